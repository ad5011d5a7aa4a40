"""runtime.data."""
