"""The command `pd-optimize`.

- `command.py`: the command; begin here
- `arguments.py`, `options.py`: the options as click has them, and their values
- `batch_sizes.py`: those of each batch size in a folder of profiles
- `cluster_options.py`, `measure_here.py`, `like.py`: the cluster; `task.py`: the task
- `output.py`: the files
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
