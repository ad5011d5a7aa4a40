"""profiler.network."""
