"""Shardings inside a stage: how the devices of a mesh share its operators.

- `search.py`: the searches by name; begin here
- `costs.py`: operators as a problem: a label for each strategy (`labels.py`), seconds and bytes
- `problem.py`: what there is to choose, whatever it stands for
- `ties.py`: equal layers with equal labels; `joining.py`: problems in which variables follow others
- `exact.py`: the best choice with its proof: bounds by message passing (`messages.py`, whose loops
  are in `passing.py` and `factors.py`), then `elimination.py`, and `integer.py` for a small rest
"""
