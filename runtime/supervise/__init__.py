"""runtime.supervise."""
