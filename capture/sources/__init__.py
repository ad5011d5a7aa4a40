"""capture.sources."""
