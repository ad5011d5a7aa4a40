"""Turns an unmodified model into a graph, and into modules that run parts of it.

`export` makes a `captured` model by torch.export; `rewrites/`, `grouping`, `fake_values` and
`autograd_functions` are its steps, `errors/` calls the user's code and has the error messages;
`checks/` compares what it gives with the model. `segment` and `node_modules` make modules of parts
of a captured model, `programs/` divides its passes, `fake_tensors` captures models larger than
memory. `sources/` loads models and data. Begin with `export`, then `segment`.
"""
