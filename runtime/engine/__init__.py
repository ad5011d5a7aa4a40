"""runtime.engine."""
