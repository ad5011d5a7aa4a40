"""The command `pd-optimize`.

- `command.py`: the command; begin here
- `arguments.py`, `options.py`: the options as click has them, and their values
- `cluster_options.py`, `measure_here.py`, `like.py`: the cluster; `task.py`: the task
- `output.py`: the files
"""
