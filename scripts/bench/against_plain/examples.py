"""Do the examples of docs/examples lose on two ranks what they lose on one, in each precision?

`python scripts/bench/against_plain/examples.py [NAME ...]` runs each example as it stands, in
float32, with the bfloat16 of its library, and with weights in bfloat16, and prints a table. What
may differ is what the example on one device varies by. Exits with 1 where a loss is out of bounds,
or a run fails.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from plain_loop import PRECISIONS, RULE, Learnt, Reference, RoundedOtherwise
from torch import nn
from trained import Failed, in_time

import pipedream
from pipedream.capture.errors.user_code import import_torchvision
from pipedream.runtime.supervise.launch import spawn

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
SECONDS, RERUNS = 600.0, 2
WHOLE = "whole-bfloat16"
LIGHTNING = {"float64": "64-true", WHOLE: "bf16-true"}
LIBRARIES = ("accelerate", "lightning", "transformers", "pipedream.adapters.transformers")


@dataclass(frozen=True)
class Example:
    """The script for one device and the one for two; `lowered`: what to replace for bfloat16.
    `double`: whether losses are in float64; those of language models never are.
    """

    plain: str
    pipeline: str
    lowered: Mapping[str, str]
    double: bool = False


CASES: Mapping[str, Example] = {
    "trainer": Example(
        "trainer.py", "trainer_pipeline.py", {"use_cpu=True": "use_cpu=True, bf16=True"}
    ),
    "accelerate": Example(
        "accelerate_loop.py",
        "accelerate_pipeline.py",
        {
            "cpu=True": 'cpu=True, mixed_precision="bf16"',
            "weigh=": 'autocast="bfloat16", weigh=',
        },
    ),
    "lightning": Example(
        "lightning_module.py",
        "lightning_pipeline.py",
        {
            '"logger": False': '"logger": False, "precision": "bf16-mixed"',
            '"cross_entropy")': '"cross_entropy", autocast="bfloat16")',
        },
        double=True,
    ),
}


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    import_torchvision()
    for library in LIBRARIES:
        importlib.import_module(library)
    good, lines = True, ["| example | precision | losses |", "|---|---|---|"]
    with tempfile.TemporaryDirectory(prefix="examples-") as folder:
        for name in sys.argv[1:] or CASES:
            for precision in (*PRECISIONS, WHOLE):
                told, fine = compared(name, precision, Path(folder) / f"{name}-{precision}")
                good &= fine
                lines.append(f"| {name} | {precision} | {told} |")
                print(lines[-1], flush=True)
    print("\n" + "\n".join(lines))
    print(f"\nParts of what is allowed: {RULE.format(reruns=RERUNS)}.")
    sys.exit(not good)


def compared(name: str, precision: str, folder: Path) -> tuple[str, bool]:
    """What to print, and whether it is as it should be."""
    example = CASES[name]
    try:
        prepare(example, precision, folder)
        plain, *others = [
            losses(partial(_alone, example.plain, number), folder) for number in range(RERUNS + 1)
        ]
        found = losses(partial(spawn, partial(_rank, example.pipeline), 2), folder)
    except Failed as end:
        return f"FAILED: {end.why}", False
    if example.double and precision == "float64":
        plain.unit = torch.finfo(torch.float64).eps
    part, _ = Reference(plain, others).parts(found)
    largest = max(abs(a - b) for a, b in zip(found.losses, plain.losses, strict=True))
    told = f"{part:.2f} (largest difference {largest:.1e}, {len(plain.losses)} losses)"
    return told + " !" * (part > 1), part <= 1


def prepare(example: Example, precision: str, folder: Path) -> None:
    """A copy of the examples in that precision, and the plan. Raises Failed."""
    shutil.copytree(EXAMPLES, folder)
    if precision != "float64":
        _replace(folder / "tokens.py", {".double()": ".bfloat16()" if precision == WHOLE else ""})
    if precision in LIGHTNING and example.plain.startswith("lightning"):
        for script in (example.plain, example.pipeline):
            chosen = f'"logger": False, "precision": "{LIGHTNING[precision]}"'
            _replace(folder / script, {'"logger": False': chosen})
    if precision == "bfloat16":
        for script in (example.plain, example.pipeline):
            text = (folder / script).read_text()
            _replace(folder / script, {a: b for a, b in example.lowered.items() if a in text})
    shutil.copytree(_planned(example, folder.parent), folder / "plan")


def _planned(example: Example, parent: Path) -> Path:
    """The plan for two ranks, made once, of the model as the examples have it. Raises Failed."""
    for_lightning = example.plain.startswith("lightning")
    folder = parent / f"planned-{for_lightning}"
    if not folder.exists():
        shutil.copytree(EXAMPLES, folder)
        _checked(_plan_for_lightning if for_lightning else partial(_script, "plan.py"), folder)
    return folder / "plan"


def _replace(path: Path, words: Mapping[str, str]) -> None:
    text = path.read_text()
    for old, new in words.items():
        assert old in text, f"{path.name} has no {old}"
        text = text.replace(old, new)
    path.write_text(text)


def losses(work: Callable[[], int], folder: Path) -> Learnt:
    """What a run of an example writes. Raises Failed."""
    (folder / "losses.json").unlink(missing_ok=True)
    _checked(work, folder)
    return Learnt(json.loads((folder / "losses.json").read_text()))


def _checked(work: Callable[[], int], folder: Path) -> None:
    """Does it in the folder. Raises Failed."""

    def there() -> int:
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        return work()

    code = in_time(there, folder / "log.txt", SECONDS)
    if code != 0:
        lines = (folder / "log.txt").read_text().splitlines()
        why = f"took more than {SECONDS:g} s" if code is None else "\n".join(lines[-1:])
        raise Failed(why, refused=False)


def _alone(script: str, number: int) -> int:
    """Number 0 is the example as it is, the others are rounded otherwise."""
    with RoundedOtherwise(number) if number else nullcontext():
        return _script(script)


def _rank(script: str, *_: object) -> int:
    torch.set_num_threads(1)
    return _script(script)


def _script(name: str) -> int:
    runpy.run_path(name, run_name="__main__")
    return 0


def _plan_for_lightning() -> int:
    widths = (8, 32, 32, 32, 3)
    layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))
    profiled = pipedream.profile(model, torch.randn(16, 8), repeats=3)
    plan = pipedream.optimize(profiled, 2, "1GB/s", schedule="flush", straight=True)
    plan.write("plan")
    return 0


if __name__ == "__main__":
    main()
