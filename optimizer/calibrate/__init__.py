"""Corrects profiled times by what pd-train measured (`--calibrate`).

- `runs.py`: reads runs and turns them into observations; begin here
- `correction.py`: the least squares problem
- `price_plan.py`: what a run's plan costs with the corrected times
- `further_profiles.py`: the mean of several profiles (`--again`)
- `verdict.py`: prints what the runs show, and whether another plan is better now
"""
