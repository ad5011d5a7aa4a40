"""Graph and cluster in, plan out: `pd-optimize`. Imports no torch."""
