"""optimizer.cuts."""
