"""Turns an unmodified model into a graph, and into modules that run parts of it.

`export` captures a model by torch.export; `grouping`, `functionalize`, `constants` and
`autograd_functions` are its steps, `capture_errors` its error messages; `checks/` compares what it
gives with the model. `segment` and `node_modules` make modules of parts of a captured model,
`fake_tensors` captures models larger than memory. `sources/` loads models and data. Begin with
`export`, then `segment`.
"""
