"""The searches for the best plan.

- `planner.py`: the entry point, with `request.py` in and `outcome.py` out; begin here
- `graph_views.py`: the graph as searches and plans have it, shared by requests that are alike
- `hierarchical.py`: PipeDream's nested pipelines
- `latency.py`, `fill_order.py`, `submeshes.py`: Alpa's flat pipelines
- `pruning.py`: the cuts that a better plan may have; `bounds.py`: certificates
- `memory_fit.py`, `required_in_flight.py`: memory and minibatches
"""
