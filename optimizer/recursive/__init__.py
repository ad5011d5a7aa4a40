"""Shardings in milliseconds, without a proof: operators in order of weight, on relative costs.

- `search.py`: from a graph to a division of its operators; begin here
- `graph.py`: the graph as arrays, and the order of its operators
- `options.py`: the ways to divide operators, as numbers
- `kernel.py`: the choice
"""
