"""optimizer.calibrate."""
