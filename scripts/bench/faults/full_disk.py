"""A disk of a run's own that is full all of a sudden."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from kills import FARTHEST, Killer
from trainings import Launcher, Run, heartbeats_of, workers_of

_SIZE = "16m"
_BLOCK = bytes(1 << 16)


class FullDisk:
    """A tmpfs at `folder`, the run's, until `unmount`. For root only."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ballast = folder, folder / ".ballast"
        self.filled, self.is_full = 0, False
        folder.mkdir()
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={_SIZE}", "faults", str(folder)], check=True
        )

    def watch(self, run: Run, killer: Killer, launcher: Launcher) -> None:
        """Until the launcher ends; fills the disk after a random number of rank 0's actions."""
        left, words = killer.random.randrange(1, FARTHEST), ""
        while launcher.poll() is None:
            heartbeats = heartbeats_of(launcher.pid) if workers_of(launcher.pid) else None
            while heartbeats is not None and left and launcher.poll() is None:
                now = heartbeats.of(0).words
                if now != words:
                    words, left = now, left - 1
                time.sleep(0.0003)
            if not left and not self.is_full:
                self._fill()
            time.sleep(0.005)

    def _fill(self) -> None:
        self.is_full, self.filled = True, self.filled + 1
        with self.ballast.open("ab", buffering=0) as file:
            for size in (len(_BLOCK), 512):
                try:
                    while file.write(_BLOCK[:size]) == size:
                        pass
                except OSError:
                    continue

    def empty(self, run: Run, name: str, code: int) -> Iterator[str]:
        """Makes space again. Yields what was wrong with how the run ended."""
        self.ballast.unlink()
        self.is_full = False
        lines = run.said(name).splitlines()
        told = [line for line in lines if line.startswith("pd-train:") and "No space left" in line]
        if code == 0:
            return  # it had nothing to write any more
        if code != 2 or len(told) != self.filled or "Traceback" in run.said(name):
            yield f"the disk was full: exit code {code}, and pd-train says {lines[-3:]}"

    def unmount(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.folder)], check=True)
