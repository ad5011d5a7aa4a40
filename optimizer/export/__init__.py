"""optimizer.export."""
