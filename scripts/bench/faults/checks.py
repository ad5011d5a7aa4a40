"""What has to be so when a training was killed and has gone on to its end."""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch
import trained
from kills import Kill
from trainings import UNDISTURBED, Run

from pipedream.runtime.checkpoint.files import latest, load_all

_OF_TIMES = {"measured.json", "timeline.png", "timeline.csv", "timeline.json"}
_SYNCHRONOUS = ("flush", "gpipe")
_Loss = tuple[int, int, float]
"""Of an epoch and a minibatch."""


def problems(run: Run, name: str, kills: Sequence[Kill]) -> Iterator[str]:
    """What differs from the undisturbed training, or is left behind in the folder."""
    yield from _named(run.named(name), kills)
    # torch makes that folder, once for each user, where it traces.
    left = [each for each in run.temporary.iterdir() if "torchinductor_" not in each.name]
    if left:
        yield f"left behind: {left}"
    losses, wanted = (_losses(run.folder / kind) for kind in (name, UNDISTURBED))
    yield from _seen(run, name, losses)
    if any(kill.how == "--replan" for kill in kills):
        yield from _replanned(run, losses, wanted)
    else:
        if losses != wanted:
            yield "minibatches or losses differ"
        yield from _same_files(run.folder / name, run.folder / UNDISTURBED, killed=bool(kills))
        yield from _same_weights(run.folder / name, run.folder / UNDISTURBED)


def _named(lines: Sequence[str], kills: Sequence[Kill]) -> Iterator[str]:
    """The launcher has to name a rank that was killed, each time and no other."""
    left = list(lines)
    for kill in kills:
        if left and kill.explains(left[0]):
            left.pop(0)
        elif not kill.may_be_unnamed:
            yield f"{kill.signal.name} to ranks {kill.ranks}, and the launcher says {left[:1]}"
    if left:
        yield f"nobody was killed, and the launcher says {left}"


def _replanned(run: Run, losses: Sequence[_Loss], wanted: Sequence[_Loss]) -> Iterator[str]:
    """Under the new plan sums are added up otherwise, and delays of late gradients are others."""
    if [each[:2] for each in losses] != [each[:2] for each in wanted]:
        yield "minibatches differ"
        return
    if run.case.schedule in _SYNCHRONOUS:
        near = [math.isclose(a[2], b[2], rel_tol=1e-9) for a, b in zip(losses, wanted, strict=True)]
        if not all(near):
            yield f"losses differ from minibatch {near.index(False)} on"
    elif not all(math.isfinite(each[2]) for each in losses):
        yield "losses are not finite"


def _same_files(found: Path, wanted: Path, killed: bool) -> Iterator[str]:
    """Times are those of the last start: where it had little left to train there are none."""
    one, other = (
        {str(path.relative_to(folder)) for path in folder.rglob("*")} for folder in (found, wanted)
    )
    if one - other or other - one - (_OF_TIMES if killed else set()):
        yield f"other files: {sorted(one ^ other)}"


def _same_weights(found: Path, wanted: Path) -> Iterator[str]:
    paths = [latest(each / "checkpoints") for each in (found, wanted)]
    for part in ("", "optimizer"):
        one, other = (load_all(path / part) for path in paths if path is not None)
        if one.keys() != other.keys() or any(not torch.equal(other[n], t) for n, t in one.items()):
            yield f"the weights differ {part}"


def _seen(run: Run, name: str, losses: Sequence[_Loss]) -> Iterator[str]:
    """Which examples made the losses of the run. No two minibatches have the same loss."""
    seen: dict[float, set[tuple[int, ...]]] = defaultdict(set)
    for line in (run.folder / f"{name}.seen").read_text().splitlines():
        with suppress(ValueError):  # of a process that was killed while it wrote
            value, numbers = json.loads(line)
            seen[value].add(tuple(numbers))
    for epoch in range(1, trained.EPOCHS + 1):
        made = [seen[value] for number, _, value in losses if number == epoch]
        if any(len(of_one) != 1 for of_one in made):
            yield f"epoch {epoch}: losses that no examples gave, or several"
        numbers = sorted(number for of_one in made for one in of_one for number in one)
        if numbers != list(range(trained.EXAMPLES)):
            yield f"epoch {epoch}: examples skipped or seen twice"


def _losses(folder: Path) -> list[_Loss]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    read = map(json.loads, lines)
    return [(line["epoch"], line["minibatch"], line["loss"]) for line in read]


def left_behind(folder: Path) -> Iterator[str]:
    """The processes that still have to do with a run in this folder: by a variable it gave them."""
    mark = f"TMPDIR={folder}".encode()
    for path in Path("/proc").iterdir():
        with suppress(OSError):
            if path.name.isdigit() and mark in (path / "environ").read_bytes().split(b"\0"):
                yield f"left behind: process {path.name}"


def shared_memory() -> set[Path]:
    """What there is in /dev/shm but for semaphores, which other programs on the machine make."""
    return {path for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.")}


def abandoned(before: set[Path]) -> Iterator[str]:
    """What is new in /dev/shm, stays there for a while, and no living process has mapped."""
    left = shared_memory() - before
    deadline = time.monotonic() + 5
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left &= shared_memory()
    for path in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            text = path.read_text()
            left -= {file for file in left if str(file) in text}
    yield from (f"left behind: {path}" for path in left)
