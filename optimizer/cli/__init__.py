"""The command `pd-optimize`.

- `planning.py`: planning as a function of options, also for each batch size in a folder of
  profiles, and for `pipedream.optimize`; begin here
- `command.py`, `arguments.py`: the command, and its options as click has them
- `options.py`, `values.py`: the options, and how they are made of what was given
- `cluster_options.py`, `measure_here.py`, `like.py`, `inputs.py`: cluster and model
- `task.py`: the task; `output.py`: the report and the files
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Runs pd-optimize, which Ctrl-C ends at once: it has no side effects until it writes files.

    KeyboardInterrupt is not enough: raised while modules are imported, or between compiled code and
    Python, it may be replaced by another exception or lost.
    """
    signal.signal(signal.SIGINT, _leave)
    from pipedream.optimizer.cli.command import main as command

    command()


def _leave(*_: object) -> None:
    os.write(sys.stderr.fileno(), b"\npd-optimize: interrupted\n")
    os._exit(130)
