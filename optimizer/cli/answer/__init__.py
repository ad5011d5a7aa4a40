"""What `pd-optimize` answers, from options to the plan that its report is of.

- `plan.py`: planning as a function of options; begin here
- `by_size.py`: the profiles of a folder, by batch size and sequence length
- `update.py`: an update of --global-batch examples, for which batch size, recomputation, order and
  plan are chosen together; `rough.py`: how that begins
- `scaling.py`: what half and twice the machines would give
"""
