"""optimizer.simulate."""
