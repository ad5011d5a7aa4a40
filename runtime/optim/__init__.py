"""How a round of gradients becomes an update.

`stepping` unscales, checks and clips them, and makes the steps; `optimizers` makes the torch.optim
optimizer of a stage, `rates` its learning rate scheduler. `late_gradients` is about those of older
weights. Begin with `stepping`.
"""
