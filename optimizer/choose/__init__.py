"""Chooses the plan that is fastest in the simulator.

- `chooser.py`: candidates in, the best of them out; begin here
- `candidates.py`: plans of the searches under all cost models, and of none
- `trial.py`: what a division of the model takes; `neighbours.py`: those that are a step away
- `expected.py`: the time to be expected in a run, and how uncertain it is
"""
