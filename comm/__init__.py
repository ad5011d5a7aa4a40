"""Rendezvous, point-to-point messages and all-reduce between processes.

`rank_info` reads what torchrun, mpirun or srun says of this process; `rendezvous` joins it with the
others, who then make their `communicators`. `transport` carries the tensors between stages, by
`messages`; `buckets` adds up gradients over the ranks that `stage_groups` and `teams` say.
`redistribute` changes how the ranks of a mesh hold a tensor, which they send each other by
`exchange`, through `shared_memory` on one host; `store_messages` carries small values; `device/` is
about the device of a rank. Begin with
`transport`.
"""
