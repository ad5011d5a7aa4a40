"""The best labels of a problem, with a proof; it knows nothing of operators and devices.

- `problem.py`: what there is to choose
- `exact.py`: the best choice: bounds by message passing (`messages.py`, on the arrays of
  `building.py`, with loops in `passing.py` and `factors.py`), then `elimination.py`, and
  `integer.py` for a small rest
- `ties.py`: equal layers with equal labels; `joining.py`: problems in which variables follow others
- `narrowing.py`: problems without what is ruled out
"""
