"""How a round of gradients becomes an update.

`stepping` unscales, checks and clips them, and makes the steps; `optimizers` and `parameter_groups`
make the torch.optim optimizer of a stage, `rates` its learning rate scheduler. `staleness` and
`late_gradients` are about gradients of older weights. Begin with `stepping`.
"""
