"""Is the time that pd-optimize expects of an order what training takes? On two processes.

    python scripts/bench/orders/predicted.py [MODEL]...

As scripts/bench/prediction.py, with rounds of four microbatches that end with a flush: in 1f1b on
two stages, in zb-h1, interleaved, zb-v and auto on the stages that pd-optimize chooses for them.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from prediction import MODELS, measure_network, profiled, report, trained

from pipedream.graph.choices import DEFAULT_ORDER
from pipedream.graph.plan import Plan
from pipedream.optimizer.choose.chooser import best_plan
from pipedream.optimizer.choose.ordered import best_ordered_plan
from pipedream.optimizer.search.request import Request

ORDERS = (DEFAULT_ORDER, "zb-h1", "interleaved", "zb-v", "auto")
MICROBATCHES = 4


def main() -> None:
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    os.environ["OMP_NUM_THREADS"] = "1"
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    report([row for name in sys.argv[1:] or MODELS for row in compare(name, folder / name)])


def compare(name: str, folder: Path) -> Iterator[dict[str, Any]]:
    measure_network(name, folder)
    before = profiled(name, folder / "first", folder)
    for order in ORDERS:
        row, before = trained(name, order, planned(before, order), before, folder)
        yield row


def planned(asked: Request, order: str) -> Plan:
    rules = replace(asked.rules, straight=True)
    flush = replace(asked, schedule="flush", microbatches=MICROBATCHES, rules=rules)
    if order == DEFAULT_ORDER:
        return best_plan(flush).plan
    return best_ordered_plan(replace(flush, order=order)).plan


if __name__ == "__main__":
    main()
