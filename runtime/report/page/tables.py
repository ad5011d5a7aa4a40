"""The figures and tables of report.html, as text: the template lays them out and escapes them."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, NamedTuple

import torch

from pipedream.graph.model import Graph
from pipedream.graph.plan import Stage, workers_by_rank
from pipedream.graph.timeline import evenly
from pipedream.graph.units import show_bytes, show_seconds
from pipedream.runtime.report.page.finished_run import FinishedRun
from pipedream.runtime.report.summary import (
    expected_seconds,
    held_out_figures,
    held_out_lines,
    own_metrics,
    peak_memory,
)
from pipedream.schedule.action import stages_and_replicas

_LAYERS = 12
_EPOCHS = 20
"""More epochs than this are thinned out in the table of held-out metrics."""


class Figure(NamedTuple):
    """A figure with its name; `beside` is what it is to be compared with."""

    name: str
    value: str
    beside: str = ""


@dataclass(frozen=True)
class Table:
    """Cells by heading, the same headings in each row. The columns `text` are aligned left."""

    rows: Sequence[Mapping[str, str]]
    text: Collection[str] = ()

    @property
    def headings(self) -> list[str]:
        """Returns those of columns that are not empty in all rows."""
        return [name for name in self.rows[0] if any(row[name] for row in self.rows)]


# The run as a whole


def headline(run: FinishedRun) -> Iterator[Figure]:
    """Yields the main figures, those that pd-train prints at the end among them."""
    summary = run.summary
    measured, expected = summary["seconds_per_minibatch"], expected_seconds(summary)
    if measured:  # else there was nothing left to train
        beside = f"expected {show_seconds(expected)}" if expected and run.job.as_planned else ""
        yield Figure("time per minibatch", show_seconds(measured), beside)
        steady = "in the steady state" * run.spent.steady
        yield Figure("samples per second", f"{summary['samples_per_second']:.0f}", steady)
    if summary["bubble"] is not None:
        simulated = summary["simulated_bubble"]
        beside = "" if simulated is None else f"simulated {simulated:.1%}"
        yield Figure("bubble", f"{summary['bubble']:.1%}", beside)
    peak, of_rank = peak_memory(summary)
    if peak:
        yield Figure("peak memory", show_bytes(peak), of_rank)
    if summary["final_loss"] is not None:
        yield Figure("final loss", f"{summary['final_loss']:.4f}")
    for name, value in held_out_figures(summary).items():
        yield Figure(name, value)


def notes(run: FinishedRun) -> list[str]:
    """Returns why figures of the plan are not for this run."""
    job, lines = run.job, []
    if not run.job.has_planned_batch:
        lines.append(
            f"The plan was made for minibatches of {job.plan.batch_size}, and this run's have"
            f" {job.config.batch_size} examples."
        )
    if not job.as_planned:
        lines.append(
            f"The plan was made for {job.plan.schedule} and trained in another way: what it expects"
            " is not comparable."
        )
    left_out = max(rank["updates_left_out"] for rank in run.summary["ranks"])
    if left_out:
        lines.append(f"{left_out} updates were left out: non-finite gradients.")
    return lines


def differences(run: FinishedRun) -> Table | None:
    """Returns expected and measured time of a minibatch, and where the difference lies."""
    comparison = run.comparison
    if comparison is None:
        return None
    parts = {
        "a minibatch": comparison.whole,
        f"stage {comparison.stage}, the busiest: compute": comparison.compute,
        f"stage {comparison.stage}: messages, waiting": comparison.rest,
    }
    rows = [
        {
            "per minibatch": name,
            "expected": show_seconds(part.expected),
            "measured": show_seconds(part.measured),
            "difference": part.shown_change,
        }
        for name, part in parts.items()
    ]
    return Table(rows, text=("per minibatch",))


def held_out(run: FinishedRun) -> Table | None:
    """Returns the metrics of held_out.jsonl by epoch; None without them."""
    read = evenly(held_out_lines(run.job.run), _EPOCHS)
    own = dict.fromkeys(name for each in read for name in own_metrics(each))
    rows = [
        {
            "epoch": str(each["epoch"]),
            "loss": f"{each['held_out_loss']:.4f}",
            "accuracy": f"{each['held_out_accuracy']:.1%}" if "held_out_accuracy" in each else "",
            **dict.fromkeys(own, ""),
            **{name: f"{value:.4g}" for name, value in own_metrics(each).items()},
        }
        for each in read
    ]
    return Table(rows) if rows else None


def environment(run: FinishedRun) -> Table:
    """Returns versions and devices, as rank 0 has them."""
    cuda = run.job.device == "cuda"
    facts = {
        "pipedream": metadata.version("pipedream"),
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "system": platform.platform(),
        "device": torch.cuda.get_device_name() if cuda else f"cpu ({platform.machine()})",
        "threads of an operator": str(torch.get_num_threads()),
        "workers": str(run.job.plan.workers),
    }
    return Table([{"what": name, "is": value} for name, value in facts.items()], ("what", "is"))


# Stages and layers


def stages(run: FinishedRun, names: Mapping[str, str], graph: Graph | None) -> Table:
    """The plan, a row for each stage; `names` are those of the nodes. What a stage sends to later
    ones is known by the `graph` of the plan.
    """
    assignment = run.job.plan.rank_assignment
    inputs = {node.id for node in run.job.plan.graph.nodes if node.is_input}
    sent = {} if graph is None else _sent_bytes(graph, run.job.plan.stage_of)
    rows = [
        {
            "stage": str(stage.stage),
            "replicas": str(stage.replicas),
            "ranks": _ranges(sorted(rank for group in groups for rank in group.ranks)),
            "nodes": str(len(stage.nodes)),
            "first and last layer": _span(stage, names, inputs),
            "parameters": show_bytes(stage.parameter_bytes),
            "activations sent": show_bytes(sent[stage.stage]) if stage.stage in sent else "",
            "time expected": show_seconds(stage.compute_seconds) if stage.compute_seconds else "",
            "measured": _pass_seconds(run, stage.stage),
        }
        for stage, groups in zip(run.job.plan.stages, assignment, strict=True)
    ]
    return Table(rows, text=("ranks", "first and last layer"))


def _sent_bytes(graph: Graph, stage_of: Mapping[str, int]) -> Counter[int]:
    """Returns by stage the bytes of the outputs of a minibatch that later stages read."""
    sent = Counter[int]()
    for name, readers in graph.read_nodes:
        if any(stage_of[reader] > stage_of[name] for reader in readers):
            sent[stage_of[name]] += round(graph.nodes[name].output_bytes)
    return sent


def _span(stage: Stage, names: Mapping[str, str], inputs: Collection[str]) -> str:
    """Returns the first and the last node that compute anything."""
    nodes = [names[node] for node in stage.nodes if node not in inputs] or ["inputs"]
    return nodes[0] if len(nodes) == 1 else f"{nodes[0]} … {nodes[-1]}"


def _ranges(ranks: Sequence[int]) -> str:
    """Returns ascending numbers as `0-3, 6`."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and ranges[-1][-1] == rank - 1:
            ranges[-1][1:] = [rank]
        else:
            ranges.append([rank])
    return ", ".join("-".join(map(str, each)) for each in ranges)


def _pass_seconds(run: FinishedRun, stage: int) -> str:
    """Returns forward plus backward on the slowest replica."""
    if run.measured is None:
        return ""
    ranks = run.measured.of_stage(stage)
    return show_seconds(max(rank.forward.median + rank.backward.median for rank in ranks))


def layers(run: FinishedRun, names: Mapping[str, str], graph: Graph | None) -> Table | None:
    """Returns the layers that take longest by the graph of the plan; None without one, or times."""
    if graph is None:
        return None
    nodes = sorted(graph.nodes.values(), key=lambda node: -node.compute_seconds)
    total = sum(node.compute_seconds for node in nodes)
    stage_of = run.job.plan.stage_of
    rows = [
        {
            "layer": names[node.id],
            "stage": str(stage_of[node.id]),
            "forward": show_seconds(node.forward_seconds),
            "backward": show_seconds(node.backward_seconds),
            "share": f"{node.compute_seconds / total:.1%}",
            "output": show_bytes(node.output_bytes),
            "parameters": show_bytes(node.parameter_bytes),
        }
        for node in nodes[:_LAYERS]
        if node.compute_seconds
    ]
    return Table(rows, text=("layer",)) if rows else None


# Ranks


def ranks_time(run: FinishedRun) -> Table | None:
    """Returns what share of its time each rank spent on what; None if it was not recorded."""
    if not run.spent.seconds:
        return None
    rows = []
    for rank, own in workers_by_rank(run.job.plan.rank_assignment).items():
        stage, replica = stages_and_replicas(own)
        shares = {name: f"{share:.1%}" for name, share in run.spent.shares(rank).items()}
        rows.append({"rank": str(rank), "stage": stage, "replica": replica, **shares})
    return Table(rows)


def ranks_memory(run: FinishedRun) -> Table:
    """Returns the memory of each rank, measured and planned, and what each stage held at once."""
    by_rank: dict[int, list[Mapping[str, Any]]] = {}
    for report in run.summary["ranks"]:
        by_rank.setdefault(report["rank"], []).append(report)
    rows = []
    for rank, reports in by_rank.items():
        stage, replica = stages_and_replicas((each["stage"], each["replica"]) for each in reports)
        planned = reports[0]["predicted_memory_bytes"]
        rows.append(
            {
                "rank": str(rank),
                "stage": stage,
                "replica": replica,
                "peak memory": show_bytes(reports[0]["peak_memory_bytes"]),
                "planned": show_bytes(planned) if planned else "",
                "reserved by torch": _shown(reports[0]["reserved_memory_bytes"]),
                "rest on the GPU": _shown(reports[0]["rest_of_gpu_bytes"]),
                "weight versions": ",".join(str(each["weight_versions"]) for each in reports),
                "minibatches in flight": ",".join(str(each["in_flight"]) for each in reports),
            }
        )
    return Table(rows)


def _shown(size: float | None) -> str:
    """Returns bytes as text; empty where there are none, as on a CPU."""
    return "" if size is None else show_bytes(size)
