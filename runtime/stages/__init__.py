"""runtime.stages."""
