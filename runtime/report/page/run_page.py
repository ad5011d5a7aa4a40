"""Writes report.html: what a run did, and what its plan expected, on one page."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import yaml

from pipedream.graph.command import UserError, write_whole
from pipedream.runtime.report.page import pictures, tables
from pipedream.runtime.report.page.finished_run import FinishedRun
from pipedream.runtime.report.page.loss_chart import loss_chart

REPORT = "report.html"
"""File name in the folder of the run."""

_Part = TypeVar("_Part")


def write_page(run: FinishedRun) -> bool:
    """Writes the page into the folder of the run. Returns whether it could be written.

    A part that cannot be made is left out, with a line on standard error: whatever is wrong with a
    report, the run has been trained.
    """
    return _attempt("the page", lambda: _write(run)) or False


def _write(run: FinishedRun) -> bool:
    write_whole(run.job.run / REPORT, _render(_parts(run)))
    return True


def _render(parts: Mapping[str, Any]) -> str:
    # Here, since only rank 0 needs it, and only at the end.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    # Names of models, layers and files come from users: autoescape keeps them text.
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(REPORT).render(parts)


def _parts(run: FinishedRun) -> dict[str, Any]:
    """Returns what the template shows, by its names there; None for what there is not."""
    job, epoch = run.job, run.summary["minibatches_per_epoch"]
    names = _attempt("names of layers", run.layer_names) or {
        node.id: node.id for node in job.plan.graph.nodes
    }
    graph = _attempt("graph", run.planned_graph)
    makers: dict[str, Callable[[], Any]] = {
        "figures": lambda: list(tables.headline(run)),
        "notes": lambda: tables.notes(run),
        "differences": lambda: tables.differences(run),
        "advice": lambda: " ".join(run.advice),
        "stages": lambda: tables.stages(run, names, graph),
        "layers": lambda: tables.layers(run, names, graph),
        "expected_timeline": lambda: pictures.expected_timeline(run),
        "measured_timeline": lambda: pictures.data_uri(job.run / pictures.TIMELINE),
        "bars": lambda: pictures.bars(run) if run.spent.seconds else None,
        "ranks_time": lambda: tables.ranks_time(run),
        "ranks_memory": lambda: tables.ranks_memory(run),
        "losses": lambda: loss_chart(job.run, epoch),
        "held_out": lambda: tables.held_out(run),
        "environment": lambda: tables.environment(run),
        "config": lambda: yaml.safe_dump(
            job.config.model_dump(mode="json", exclude_none=True), sort_keys=False
        ),
    }
    parts = {name: _attempt(name.replace("_", " "), make) for name, make in makers.items()}
    return {**parts, "job": job, "run": run, "finished": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"}


def _attempt(part: str, make: Callable[[], _Part]) -> _Part | None:
    """Returns what `make` returns; None if it raises, whatever that is."""
    try:
        return make()
    except Exception as error:
        why = UserError(f"{REPORT}: {part} left out: {type(error).__name__}: {error}")
        print(f"pd-train: {why.format_message()}", file=sys.stderr, flush=True)
        return None
