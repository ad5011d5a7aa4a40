"""Trains every module of the zoo, or sees it refused: `python scripts/bench/against_plain/zoo.py`.

`[PATTERN]...` are parts of names.

Takes the modules of tests/support/zoo whose names contain one of the patterns [default: all]
through all ways of training, each against a plain loop: whole, and cut in 2 and 3 stages; by
autograd, and by programs, with backward passes in halves; with recompute; with smaller minibatches;
in eval mode. Prints a table, writes zoo.json, and ends with 1 if a module is trained to something
else.

`--ways 'whole, 2 stages'`: these alone, separated by semicolons. `--out FILE`: instead of zoo.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
for _folder in ("tests/support", "tests/runtime/support", "tests/schedule/support"):
    sys.path.insert(0, str(ROOT / _folder))

from zoo.specimens import zoo  # noqa: E402
from zoo.survey import EVALUATION, TRAINING, survey  # noqa: E402
from zoo.verdict import Verdict  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("patterns", nargs="*", default=[""])
    parser.add_argument("--ways", default="")
    parser.add_argument("--out", type=Path, default=Path("zoo.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    ways = [way for way in options.ways.split(";") if way]
    found: dict[str, dict[str, Verdict]] = {}
    for name, specimen in zoo().items():
        if any(pattern in name for pattern in options.patterns):
            found[name] = survey(specimen, *ways)
            print(f"{len(found):4} {name}: {_summary(found[name])}", file=sys.stderr, flush=True)
            options.out.write_text(json.dumps(_plain(found), indent=1))
    Console(width=160).print(_table(found))
    sys.exit(any(each.is_wrong for verdicts in found.values() for each in verdicts.values()))


def _summary(verdicts: Mapping[str, Verdict]) -> str:
    odd = {str(each): way for way, each in reversed(verdicts.items()) if each.word != "equal"}
    return "; ".join(f"{way}: {line}" for line, way in odd.items()) or "equal"


def _plain(found: Mapping[str, Mapping[str, Verdict]]) -> dict[str, dict[str, str]]:
    return {name: {way: str(each) for way, each in own.items()} for name, own in found.items()}


def _table(found: Mapping[str, Mapping[str, Verdict]]) -> Table:
    """A row for each module: the largest difference in each way, or what came of it."""
    table = Table("module", *TRAINING, *EVALUATION, box=None)
    for name, verdicts in found.items():
        refused = [each for way, each in verdicts.items() if way.startswith("capture")]
        row = [_cell(verdicts.get(way, refused[0] if refused else None)) for way in _ways()]
        table.add_row(name, *row)
    return table


def _ways() -> list[str]:
    return [*TRAINING, *EVALUATION]


def _cell(verdict: Verdict | None) -> str:
    if verdict is None:
        return "-"
    if verdict.word == "equal":
        return f"{verdict.difference:.0e}" if verdict.difference else "0"
    return verdict.word


if __name__ == "__main__":
    main()
