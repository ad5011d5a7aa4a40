"""optimizer.cli."""
