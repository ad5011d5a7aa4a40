"""Groups of all models that can be captured: are they groups, and do they compute the same?

    python scripts/bench/groups/captured_groups.py [NAME]...

For each architecture of docs/reference/coverage.md, in a process of its own: each node is in one
group of `--group module` and of `fusion`, and groups read each other in one order; the model run
group by group gives the outputs, gradients and buffers of the plain model. Prints nodes, groups,
how many groups of modules differ (and are compiled), and the ways to cut in two before and after.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import networkx as nx
import pandas as pd
import torch
from torch import Tensor

BENCH = Path(__file__).parents[1]
sys.path += [str(BENCH / "architectures"), str(Path(__file__).parent)]

from captured_models import (  # noqa: E402
    TIMM,
    TORCHVISION,
    TRANSFORMERS,
    Case,
    Trial,
    apart,
    books,
    import_libraries,
)
from planning import cuts  # noqa: E402

from pipedream.capture.captured import Captured  # noqa: E402
from pipedream.capture.grouped import Grouped, mark_groups  # noqa: E402
from pipedream.capture.segment import freeze_constants, segment  # noqa: E402
from pipedream.graph.errors import UserError  # noqa: E402
from pipedream.optimizer.cuts.groups import classes_of, fusion_groups, whole_modules  # noqa: E402
from pipedream.optimizer.cuts.planning_graph import PlanningGraph  # noqa: E402

LIMIT = 600.0
"""Seconds for one model."""


def main() -> None:
    import_libraries()
    torch.set_num_threads(1)
    rows = []
    names = sys.argv[1:] or [""]
    for case in (*TORCHVISION, *TIMM, *TRANSFORMERS):
        if any(name in case.source for name in names):
            found = apart(report, case, LIMIT)
            own = {"said": found} if isinstance(found, str) else found
            rows.append({"model": case.name, **own})
            print(" | ".join(map(str, rows[-1].values())), flush=True)
    frame = pd.DataFrame(rows)
    print(frame.to_string(index=False))
    sys.exit(not frame.said.isin(["equal", "refused"]).all())


def report(case: Case, send: Connection) -> None:
    try:
        found = tried(case)
    except UserError:
        found = {"said": "refused"}
    except Exception as error:
        found = {"said": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    send.send(json.dumps(found))


def tried(case: Case) -> dict[str, Any]:
    trial = Trial.of(case)
    captured = trial.captured
    part = freeze_constants(segment(captured, captured.working, captured.outputs), captured.owner)
    mark_groups(part.module, captured, captured.working)
    grouped = Grouped.of(part.module)
    found = computed(captured, grouped, part.inputs, trial.inputs)
    return {
        "said": trial.difference(found) or "equal",
        **counted(captured),
        "compiled": f"{grouped.forms} of {len(grouped.groups)}",
    }


def computed(
    captured: Captured, grouped: Grouped, read: Sequence[str], inputs: Sequence[Tensor]
) -> dict[str, Tensor]:
    """What the model computes group by group."""
    known = dict(zip(captured.inputs, inputs, strict=True))
    torch.manual_seed(1)
    run = grouped.run_by(lambda group: group.module)
    results = run({}, tuple(known[name] for name in read))
    values = known | dict(zip(grouped.outputs, results, strict=True))
    outputs = [values[name] for name in captured.outputs]
    module = captured.module
    return books(outputs, dict(module.named_parameters()), dict(module.named_buffers()))


def counted(captured: Captured) -> dict[str, Any]:
    """Checks groups of both kinds, and counts."""
    graph = captured.graph
    plain = PlanningGraph.of(graph)
    of_modules = whole_modules(plain, captured.module_paths)
    counts: dict[str, Any] = {"nodes": len(plain), "cuts": cuts(plain)}
    ways = {"fusion": fusion_groups(plain, classes_of(graph, None)), "module": of_modules}
    for way, groups in ways.items():
        assert sorted(n for g in groups for n in g) == sorted(plain.names), "a node is in no group"
        number = {name: k for k, group in enumerate(groups) for name in group}
        pairs = ((number[a], number[b]) for a, b in graph.edges if a in number and b in number)
        quotient = nx.DiGraph((a, b) for a, b in pairs if a != b)
        assert nx.is_directed_acyclic_graph(quotient), f"groups of {way} wait for each other"
        planning = PlanningGraph.of(graph, groups=tuple(groups))
        counts |= {way: len(planning), f"cuts of {way}": cuts(planning)}
    return counts


if __name__ == "__main__":
    main()
