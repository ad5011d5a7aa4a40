"""Simulates a plan's schedule, action by action.

- `simulator.py`: the event loop; begin here
- `workload.py`: what each stage does, and the result
- `long_rounds.py`: extrapolates very long rounds
"""
