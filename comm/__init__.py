"""Processes of a run and the messages between them, on torch.distributed.

`launcher` reads the rank from the environment, `rendezvous` joins the ranks and chooses the device.
`transport` sends tensors between stages and adds them up over ranks, `buckets` sums gradients
during the backward pass, `process_groups` makes the groups. `store_messages`: texts between ranks.
Begin with `transport`.
"""
