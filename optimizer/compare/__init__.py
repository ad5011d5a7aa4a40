"""optimizer.compare."""
