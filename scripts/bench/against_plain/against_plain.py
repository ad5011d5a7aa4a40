"""Does every way of training learn what a plain loop of PyTorch learns?

`python scripts/bench/against_plain/against_plain.py -o FOLDER` trains twenty models in three
precisions and in all ways, and compares the losses of ten minibatches and the gradients of the
first update. `--models`, `--precisions` and `--ways` choose some, `--quick` is a small part. What
FOLDER has already of the same code of the plain loop is used again; `--resume` also skips the cells
that it has. Exits with 1 where a cell is out of bounds, or a run fails without refusing.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import math
import multiprocessing
import os
import shutil
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from compared_models import MODELS
from plain_loop import FURTHER, PRECISIONS, RULE, Reference, reference
from trained import Failed, Trainings, loss_function
from ways import MINIBATCHES, WAYS

HERE = Path(__file__).parent
SECONDS = 120.0
"""For one run."""
RERUNS = 2
QUICK = {
    "models": "gpt2 resnet gru",
    "precisions": "bfloat16 float64",
    "ways": "2|2 zb|mesh 2|Pipeline 2",
}


@dataclass(frozen=True)
class Cell:
    """A way of a model in a precision: differences as parts of what is allowed, or why none."""

    model: str
    precision: str
    way: str
    loss: float = math.nan
    gradient: float = math.nan
    refused: str = ""
    failed: str = ""
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return bool(self.refused) or (not self.failed and max(self.loss, self.gradient) <= 1)

    @property
    def shown(self) -> str:
        if self.failed or self.refused:
            return "FAILED" if self.failed else "refused"
        return f"{_short(self.loss)} {_short(self.gradient)}" + " !" * (not self.good)


def _short(part: float) -> str:
    return f"{part:.2f}" if part < 100 else f"{part:.0e}"


def main() -> None:
    options = _options()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder: Path = options.output
    folder.mkdir(parents=True, exist_ok=True)
    cells = {_key(cell): cell for cell in _read(folder)} if options.resume else {}
    begin = time.monotonic()
    for model in options.models:
        MODELS[model].make()  # imports what it needs, once for all processes
    gc.freeze()  # else each process looks through all that has been imported
    for model in options.models:
        for precision in options.precisions:
            ways = [way for way in options.ways if (model, precision, way) not in cells]
            if ways:
                trainings = Trainings(model, precision, folder / "runs", options.unchecked)
                for cell in _in_a_process(trainings, ways, folder, options.seconds):
                    cells[_key(cell)] = cell
                _write(folder, cells.values())
    chosen = [
        cells[model, precision, way]
        for model in options.models
        for precision in options.precisions
        for way in options.ways
    ]
    print(f"\n{table(chosen, options.ways)}")
    print(f"{time.monotonic() - begin:.0f} s")
    sys.exit(not all(cell.good for cell in chosen))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Formatter)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--models", help=f"of {' '.join(MODELS)}")
    parser.add_argument("--precisions", help=f"of {' '.join((*PRECISIONS, *FURTHER))}")
    parser.add_argument("--ways", help=f"of {'|'.join(WAYS)}")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for one run")
    parser.add_argument("--unchecked", action="store_true", help="leave the self-check out")
    parser.add_argument("--quick", action="store_true", help=f"as with {QUICK}")
    parser.add_argument("--resume", action="store_true", help="skip cells that FOLDER has")
    options = parser.parse_args()
    for name, known, mark in (
        ("models", MODELS, None),
        ("precisions", (*PRECISIONS, *FURTHER), None),
        ("ways", WAYS, "|"),
    ):
        given = getattr(options, name) or (QUICK[name] if options.quick else None)
        every = PRECISIONS if name == "precisions" else known
        chosen = list(every) if given is None else [each.strip() for each in given.split(mark)]
        if unknown := [each for each in chosen if each not in known]:
            parser.error(f"--{name}: {', '.join(unknown)}: there are {', '.join(known)}")
        setattr(options, name, chosen)
    return options


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """The description as it stands."""


def _in_a_process(
    trainings: Trainings, ways: Sequence[str], folder: Path, seconds: float
) -> list[Cell]:
    """The cells of one model in one precision; a capture that hangs or dies ends with them."""
    model, precision = trainings.name, trainings.precision
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_cells, args=(trainings, ways, folder, seconds, send))
    process.start()
    send.close()
    cells: list[Cell] = []
    try:
        while len(cells) < len(ways):
            failed = f"took more than {4 * seconds:g} s, or died, before it was trained"
            cell = Cell(model, precision, ways[len(cells)], failed=failed)
            if receive.poll(4 * seconds):
                cell = receive.recv()
            else:
                process.kill()
            cells.append(cell)
            _say(cell)
    except EOFError:
        cells += [Cell(model, precision, way, failed="died") for way in ways[len(cells) :]]
    finally:
        process.kill()
        process.join()
    return cells


def _say(cell: Cell) -> None:
    name = f"{cell.model:9} {cell.precision:9} {cell.way:13}"
    print(name, cell.shown, cell.refused or cell.failed, f"{cell.seconds:.0f} s", flush=True)


def _cells(
    trainings: Trainings, ways: Sequence[str], folder: Path, seconds: float, send: Connection
) -> None:
    torch.set_num_threads(1)
    shutil.rmtree(trainings.folder, ignore_errors=True)
    for way in ways:
        begin = time.monotonic()
        cell = _cell(trainings, way, folder, seconds)
        send.send(replace(cell, seconds=time.monotonic() - begin))


def _cell(trainings: Trainings, way: str, folder: Path, seconds: float) -> Cell:
    name, precision = trainings.name, trainings.precision
    try:
        expected = reference_of(name, precision, WAYS[way].minibatches, folder)
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        return Cell(name, precision, way, refused=f"by the plain loop: {first}")
    try:
        loss, gradient = expected.parts(trainings.train(way, WAYS[way], seconds))
    except Failed as end:
        refused, failed = (end.why, "") if end.refused else ("", end.why)
        return Cell(name, precision, way, refused=refused, failed=failed)
    except Exception as error:
        traceback.print_exc()
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return Cell(name, precision, way, failed=why)
    return Cell(name, precision, way, loss, gradient)


def reference_of(name: str, precision: str, minibatches: str, folder: Path) -> Reference:
    """From the folder, if it is there. Raises RuntimeError where the plain loop cannot."""
    compared, data = MODELS[name], MINIBATCHES[minibatches]
    known = hashlib.sha256(repr((minibatches, data, RERUNS, compared.batched)).encode())
    for source in ("compared_models.py", "plain_loop.py"):
        known.update((HERE / source).read_bytes())
    path = folder / "references" / f"{name}-{precision}-{known.hexdigest()[:16]}.pt"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        examples, updates = compared.examples(data.examples), data.updates(compared.batched)
        made = reference(compared.make, examples, loss_function(name), updates, precision, RERUNS)
        torch.save(made, path)
    found: Reference = torch.load(path, weights_only=False)
    return found


def table(cells: Sequence[Cell], ways: Sequence[str]) -> str:
    """A row for each model and precision, a column for each way, and what was refused or failed."""
    lines = [f"| model | precision | {' | '.join(ways)} |", "|---" * (len(ways) + 2) + "|"]
    for at in range(0, len(cells), len(ways)):
        row = cells[at : at + len(ways)]
        shown = " | ".join(cell.shown for cell in row)
        lines.append(f"| {row[0].model} | {row[0].precision} | {shown} |")
    lines += ["", f"Cells: losses, gradients; {RULE.format(reruns=RERUNS)}.", ""]
    for title in ("failed", "refused"):
        reasons: dict[str, list[str]] = {}
        for cell in cells:
            if why := getattr(cell, title):
                reasons.setdefault(why, []).append(f"{cell.model} {cell.precision} {cell.way}")
        lines += [f"{title}: {why} ({'; '.join(where)})" for why, where in reasons.items()]
    good = sum(cell.good and not cell.refused for cell in cells)
    refused, bad = sum(bool(c.refused) for c in cells), sum(not c.good for c in cells)
    lines.append(f"{good} of {len(cells)} within bounds, {refused} refused, {bad} wrong or failed")
    return "\n".join(lines)


def _key(cell: Cell) -> tuple[str, str, str]:
    return cell.model, cell.precision, cell.way


def _read(folder: Path) -> list[Cell]:
    path = folder / "cells.json"
    return [Cell(**each) for each in json.loads(path.read_text())] if path.exists() else []


def _write(folder: Path, cells: Iterable[Cell]) -> None:
    (folder / "cells.json").write_text(json.dumps([asdict(cell) for cell in cells], indent=1))


if __name__ == "__main__":
    main()
