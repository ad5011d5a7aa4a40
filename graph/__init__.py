"""The files that the three tools exchange, and the objects that those files hold. Without torch.

`model` (graph.txt), `profile`, `cluster`, `plan`, `run_config`, `measured_run`:
one file format each, checked by pydantic. `timeline` and `draw`: pictures of them. `errors` and
`command`: one line for every mistake of a user. `units`: text to bytes and seconds.
`placements/`: tensors that several devices hold. Begin with `model`, then `profile` and `plan`.
"""
