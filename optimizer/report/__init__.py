"""What pd-optimize prints.

- `plan_report.py`: the report of a plan; begin here
- `tables.py`: how its tables look, and those of other plans, runs and shardings
"""
