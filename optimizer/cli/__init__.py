"""The command `pd-optimize`.

- `command.py`: the command; begin here
- `arguments.py`, `options.py`: the options as click has them, and their values
- `cluster_options.py`, `like.py`, `task.py`: from options to a cluster and a task
- `output.py`: the files
"""
