"""runtime.optim."""
