"""Gives a program a part of a core, whatever others do: `part_of_core.py 0.45 pd-train ...`.

So a machine with few cores stands for several smaller machines, each as slow while others wait as
while they work. Enters a control group of its own with a quota of processor time, and becomes the
program, which passes the quota on to its threads and children. Those that share a core take short
`turns`, where somebody has begun them. Linux, as root.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from turns import take_turns

QUOTA = 0.001
"""Seconds, the least that the kernel takes, so that a process soon gets its part again."""
GROUPS = Path("/sys/fs/cgroup")


def main() -> None:
    part, program = float(sys.argv[1]), sys.argv[2:]
    enter(group(f"part-{os.getpid()}", part))
    take_turns()
    cores = sorted(os.sched_getaffinity(0))
    rank = int(os.environ.get("LOCAL_RANK", 0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.execvp(program[0], program)


def group(name: str, part: float) -> Path:
    """Makes a control group; under version 1 the controller has a folder of its own."""
    period, quota = round(QUOTA / part * 1e6), round(QUOTA * 1e6)
    if (GROUPS / "cgroup.controllers").exists():
        (GROUPS / name).mkdir()
        (GROUPS / name / "cpu.max").write_text(f"{quota} {period}")
        return GROUPS / name
    made = GROUPS / "cpu" / name
    made.mkdir()
    (made / "cpu.cfs_period_us").write_text(str(period))
    (made / "cpu.cfs_quota_us").write_text(str(quota))
    return made


def enter(made: Path) -> None:
    """Moves this process there, and takes away the groups of those that have ended."""
    (made / "cgroup.procs").write_text(str(os.getpid()))
    for other in made.parent.glob("part-*"):
        if not Path("/proc", other.name.removeprefix("part-")).exists():
            with contextlib.suppress(OSError):  # children of that process, or another took it away
                other.rmdir()


if __name__ == "__main__":
    main()
