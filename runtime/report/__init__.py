"""runtime.report."""
