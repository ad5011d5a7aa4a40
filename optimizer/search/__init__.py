"""The searches for the best plan.

- `planner.py`: the entry point, with `request.py` in and `outcome.py` out; begin here
- `placed_plan.py`: plans of stages on given devices; `split.py`: stages that the user gives
- `hierarchical.py`: PipeDream's nested pipelines
- `latency.py`, `fill_order.py`: Alpa's flat pipelines
- `pruning.py`: the cuts that a better plan may have; `bounds.py`: certificates
- `nothing_fits.py`: what would make a plan fit
"""
