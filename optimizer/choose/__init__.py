"""Chooses the plan that is fastest in the simulator.

- `chooser.py`: candidates in, the best of them out; begin here
- `candidates.py`: plans of the searches under all cost models, and of none
- `trial.py`: what a division of the model takes, tried by `placed_trials.py` in the order 1F1B and
  by `ordered_trials.py` in others; `neighbours.py`: those that are a step away
- `local_search.py`: from division to division; `ordered.py` chooses for the other orders
- `bound.py`: what no plan takes less than
- `expected.py`: the time to be expected in a run; `interval.py`: what nine of ten runs take
"""
