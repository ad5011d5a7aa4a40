"""Simulates a plan's schedule, action by action.

- `simulator.py`: from a plan to times; begin here. `workload.py`: what each stage does
- `program.py`, `traffic.py`, `sums.py`: actions, messages and sums as arrays
- `play.py`, `links.py`: when each begins and ends, over shared links
- `closed_form.py`: the same in closed form; `long_rounds.py`: of very many microbatches
"""
