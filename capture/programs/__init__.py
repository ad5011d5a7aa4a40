"""A stage as programs: its forward pass, the gradients of its inputs, those of its weights.

`joint.py` traces the passes as one graph, `functional.py` leaves no writes in it, `draws.py` takes
random numbers off it, `cut.py` divides it, `program.py` runs the parts; `memory.py` says whose
memory a gradient has. `description.py` tells planners of its operators, `attribution.py` of which
layer each is, `localize.py` makes the graph of one device of a mesh out of it. `means.py` and
`native_norms.py` first write what cannot be divided as operators that can; `batch_norms.py` is what
devices that divide a batch execute instead.
"""
