"""Compares the plan with others.

- `comparison.py` (--compare): with six other plans, of which three are baselines
- `sweep.py` (--sweep): for other numbers of workers
- `batch_sizes.py`: for other batch sizes
"""
