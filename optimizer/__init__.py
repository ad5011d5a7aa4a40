"""`pd-optimize`: graph and cluster in, plan out. Imports no torch.

- `cli/`: the command, its options and what it writes; `report/`: what it prints
- `search/`: the two searches for a plan; begin with `search/planner.py`
- `cuts/`: where a model can be cut; `cost/`: what a stage costs; `simulate/`: how a plan runs
- `sharding/`: stages on meshes of devices
- `compare/`, `calibrate/`, `export/`: other plans, measured runs, other frameworks
"""
