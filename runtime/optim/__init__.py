"""How a round of gradients becomes an update.

`stepping` unscales, checks and clips them, and makes the steps; `optimizers` makes the torch.optim
optimizer of a stage, `rates` its learning rate scheduler. `weights` are the versions that updates
make; `late_gradients` and `prediction` are about gradients of older ones. Begin with `stepping`.
"""
