"""profiler.report."""
