"""The device of a rank.

`memory` says how much it has left, `copies` copies many tensors at a time, `host_copy` one to the
host that nobody waits for yet; `threads` starts threads that may have to do with it.
"""
