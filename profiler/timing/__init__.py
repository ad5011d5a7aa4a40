"""profiler.timing."""
