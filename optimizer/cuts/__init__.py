"""Where a model can be cut.

- `planning_graph.py`, `downsets.py`: the nodes to divide, and sums over cuts; begin here
- `antichains.py`: all cuts; `frontier.py`, `likely_cuts.py`: the likely ones, if there are too many
- `layering.py`: cuts between layers
"""
