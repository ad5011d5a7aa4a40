"""optimizer.search."""
