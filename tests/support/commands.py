"""Commands as a user types them: as real programs, or in processes that have torch already."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from forked import forking
from processes import warm_context

MAIN = {
    "pd-profile": "pipedream.profiler.cli",
    "pd-optimize": "pipedream.optimizer.cli.command",
    "pd-train": "pipedream.runtime.cli",
}
PROGRAMS = Path(sys.executable).parent


@dataclass(frozen=True)
class Done:
    """How a command ended; `code` is negative for a signal, as in subprocess."""

    code: int
    out: str
    error: str


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
) -> list[Done]:
    """The same several times at once, with these variables each: as a launcher would."""
    files = [tuple(folder / f".{what}{n}" for what in ("out", "error")) for n in range(len(places))]
    processes = [
        warm_context().Process(target=_become, args=(folder, command, dict(variables), both))
        for variables, both in zip(places, files, strict=True)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    late = [number for number, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    texts = [[path.read_text() if path.exists() else "" for path in both] for both in files]
    assert not late, f"{' '.join(command)}: still there after {seconds} s: {late}\n{texts}"
    return [
        Done(process.exitcode or 0, *both) for process, both in zip(processes, texts, strict=True)
    ]


def _become(
    folder: Path, command: Sequence[str], variables: Mapping[str, str], files: tuple[Path, Path]
) -> None:
    for path, descriptor in zip(files, (1, 2), strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.chdir(folder)
    os.environ |= {"OMP_NUM_THREADS": "1", **variables}
    sys.argv = [str(PROGRAMS / command[0]), *command[1:]]
    with forking():
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
