"""A stage as programs: its forward pass, the gradients of its inputs, those of its weights.

`joint.py` traces the passes as one graph without writes, `draws.py` takes random numbers off it,
`split_passes.py` divides it, `program.py` runs the parts. `description.py` tells planners of its
operators, `attribution.py` of which layer each is, `localize.py` makes the graph of one device of a
mesh out of it. `divisible.py` first writes what cannot be divided as operators that can;
`batch_norms.py` is what devices that divide a batch execute instead. `parameter_roles.py` tells
optimizers what each parameter is for.
"""
