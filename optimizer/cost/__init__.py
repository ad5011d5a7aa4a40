"""optimizer.cost."""
