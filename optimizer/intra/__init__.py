"""Shardings inside a stage: how the devices of a mesh share its operators.

- `search.py`: the searches by name; begin here
- `costs.py`: operators as a problem: a label for each strategy (`labels.py`), seconds and bytes
- `cones.py`: clusters of operators that are divided alike
- `solver/`: the best labels of a problem, whatever it stands for
"""
