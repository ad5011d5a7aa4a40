"""runtime.checkpoint."""
