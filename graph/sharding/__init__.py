"""Where the elements of a tensor are when several devices hold it, and how to move them. No torch.

`placement`: replicated, sharded or partial on each axis of a device mesh. `regions`: what a device
then holds. `notation`: the placements as text, in the notations of DTensor, Alpa and MindSpore.
`steps`, `redistribution`, `adjoint`: from one placement to another on one mesh, and back for the
gradients. `tiles`: from one mesh to another. Begin with `placement`, then `regions`.
"""
