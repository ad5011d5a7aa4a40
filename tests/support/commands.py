"""Commands as a user types them: as real programs, or in processes that have torch already."""

from __future__ import annotations

import multiprocessing.process
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from processes import warm_context

MAIN = {
    "pd-profile": "pipedream.profiler.cli",
    "pd-optimize": "pipedream.optimizer.cli.command",
    "pd-train": "pipedream.runtime.cli",
}
PROGRAMS = Path(sys.executable).parent


@dataclass
class Begun:
    """A command at work in a process forked off one that knows torch; `files`: out and error."""

    process: multiprocessing.process.BaseProcess
    files: tuple[Path, Path]

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def done(self, seconds: float) -> Done:
        """How it ended; fails, and kills it, when time is up."""
        self.process.join(max(0.0, seconds))
        late = self.process.is_alive()
        self.process.kill()
        self.process.join()
        out, error = (path.read_text() if path.exists() else "" for path in self.files)
        assert not late, f"still there after {seconds} s:\n{out}{error}"
        return Done(self.process.exitcode or 0, out, error)


@dataclass(frozen=True)
class Done:
    """How a command ended; `code` is negative for a signal, as in subprocess."""

    code: int
    out: str
    error: str


def but_progress(error: str) -> str:
    """Without the lines that pd-profile says now and then where a machine is slow, or busy."""
    return re.sub(r"(?m)^pd-profile: .* after \d+ s\n", "", error)


def typed(
    folder: Path,
    command: Sequence[str],
    variables: Mapping[str, str] | None = None,
    seconds: float = 60.0,
) -> Done:
    """Runs the command's `main` in `folder`, in a process forked off one that knows torch.

    Workers of `pd-train` are forked off it, all else that it starts are real programs. Fails, and
    kills it, when time is up.
    """
    (done,) = typed_together(folder, command, [variables or {}], seconds)
    return done


def typed_together(
    folder: Path,
    command: Sequence[str],
    places: Sequence[Mapping[str, str]],
    seconds: float = 60.0,
    prepare: Callable[[], None] | None = None,
) -> list[Done]:
    """The same several times at once, with these variables each: as a launcher would. `prepare` is
    called in each process first.
    """
    deadline = time.monotonic() + seconds
    begun = [
        begin(folder, command, each, str(number), prepare) for number, each in enumerate(places)
    ]
    try:
        return [each.done(deadline - time.monotonic()) for each in begun]
    finally:
        for each in begun:
            each.process.kill()


def begin(
    folder: Path,
    command: Sequence[str],
    variables: Mapping[str, str],
    name: str = "",
    prepare: Callable[[], None] | None = None,
) -> Begun:
    """Starts the same; `name` sets it apart from others of the folder."""
    files = folder / f".out{name}", folder / f".error{name}"
    process = warm_context().Process(
        target=_become, args=(folder, command, dict(variables), files, prepare)
    )
    process.start()
    return Begun(process, files)


def _become(
    folder: Path,
    command: Sequence[str],
    variables: Mapping[str, str],
    files: tuple[Path, Path],
    prepare: Callable[[], None] | None,
) -> None:
    for path, descriptor in zip(files, (1, 2), strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.chdir(folder)
    os.environ |= {"OMP_NUM_THREADS": "1", **variables}
    sys.argv = [str(PROGRAMS / command[0]), *command[1:]]
    if prepare is not None:
        prepare()
    import_module(MAIN[command[0]]).main(list(command[1:]))


def start(
    folder: Path, command: Sequence[str], variables: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Starts the real program in `folder`, in a session of its own."""
    return subprocess.Popen(
        [str(PROGRAMS / command[0]), *command[1:]],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def interrupt(process: subprocess.Popen[str], run: Path) -> str:
    """Ctrl-C once the run in that folder has its first loss; what the process told on stderr.

    It is gone afterwards, whatever happens.
    """
    metrics = run / "metrics.jsonl"
    deadline = time.monotonic() + 90
    try:
        while not (metrics.exists() and metrics.stat().st_size):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    return error
