"""Runs of pd-train on plans with an order of passes, and the plain model to compare them with."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pytest
import small_models
import torch
import yaml
from commands import typed
from plans import make_plan
from torch import Tensor, nn

from pipedream.capture.export import capture
from pipedream.graph.model import Graph
from pipedream.graph.plan import Plan, write_plan
from pipedream.graph.run_config import RunConfig, read_config
from pipedream.runtime.checkpoint.files import latest, load_all, load_plain
from pipedream.runtime.data.reader import Epoch

CPU = torch.device("cpu")
MOMENTUM = {"name": "SGD", "args": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}}
ADAM = {"name": "AdamW", "args": {"lr": 0.02}}
CONFIG = {
    "format": "pipedream-run/1",
    "data": {"source": "small_models:classes", "args": {"examples": 66}},
    "batch_size": 4,
    "drop_last": True,
    "microbatches": 4,
    "epochs": 3,
    "seed": 3,
    "dtype": "float64",
    "evaluate_every": 1,
}
"""49 examples are twelve minibatches, three rounds; 17 are held out, the last by itself."""


def prepare(
    folder: Path, model: str, order: str, ranks: Sequence[Sequence[int]], **changes: object
) -> RunConfig:
    """run.yaml and plan.json; each stage is on these ranks."""
    text = CONFIG | {"model": {"source": f"small_models:{model}"}} | changes
    (folder / "run.yaml").write_text(yaml.safe_dump(text))
    config = read_config(folder / "run.yaml")
    write_plan(plan_of(model, order, ranks, config.microbatches), folder / "plan.json")
    return config


def plan_of(
    model: str,
    order: str | None,
    ranks: Sequence[Sequence[int]],
    in_flight: int,
    recompute: Collection[int] = (),
    times: Mapping[str, object] | None = None,
) -> Plan:
    graph = capture(getattr(small_models, model)(), (torch.randn(4, 6),)).graph
    made = make_plan(
        graph, pieces(graph, len(ranks)), [len(own) for own in ranks], "flush", recompute
    )
    data = made.model_dump(exclude_none=True) | ({"order": order} if order else {})
    data |= {"order_times": times} if times else {}
    for stage, own in zip(data["stages"], ranks, strict=True):
        stage |= {"ranks": tuple(own), "in_flight": max(in_flight, len(ranks))}
    return Plan.model_validate(data)


def pieces(graph: Graph, stages: int) -> list[list[str]]:
    """As `cut`, but the inputs, which take no time, belong to the first stage beside its share."""
    inputs = [name for name in graph.order if graph.nodes[name].description.startswith("Input")]
    order = [name for name in graph.order if name not in inputs]
    ends = [len(order) * (stage + 1) // stages for stage in range(stages)]
    first, *others = (order[b:e] for b, e in zip([0, *ends], ends, strict=False))
    return [[*inputs, *first], *others]


def train(folder: Path, *options: str, plan: str = "plan.json", run: str = "run") -> None:
    command = ["pd-train", plan, "--config", "run.yaml", "-o", run, *options]
    done = typed(folder, command)
    assert done.code == 0, done.error


def plain(config: RunConfig) -> tuple[list[float], nn.Module, list[float]]:
    """The losses of the plain model, the model, and its held-out losses after each epoch."""
    torch.manual_seed(config.seed)
    model = getattr(small_models, config.model.source.partition(":")[2])().double()
    optimizer = getattr(torch.optim, config.optimizer.name)(
        model.parameters(), **config.optimizer.args
    )
    data, held_out = small_models.classes(**config.data.args)
    losses: list[float] = []
    tried: list[float] = []
    for number in range(1, config.epochs + 1):
        epoch = Epoch(data, config, number, CPU)
        for first in range(0, len(epoch), config.microbatches):
            numbers = range(first, min(first + config.microbatches, len(epoch)))
            batches = [epoch.batch(index) for index in numbers]
            each = [loss_of(model, batch.inputs[0], batch.target) for batch in batches]
            (sum(each) / len(each)).backward()  # type: ignore[union-attr]
            if config.clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            losses += [loss.item() for loss in each]
        x, y = held_out.tensors
        with torch.no_grad():
            tried.append(loss_of(model, x.double(), y).item())
    return losses, model, tried


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def assert_as_plain(
    folder: Path,
    config: RunConfig,
    run: str = "run",
    reference: tuple[list[float], nn.Module, list[float]] | None = None,
) -> None:
    """Losses, weights, held-out losses; and the checkpoint is one that the plain model loads.
    `reference`: what `plain` has returned for this config, if it is known.
    """
    expected, model, held_out = reference or plain(config)
    lines = map(json.loads, (folder / run / "metrics.jsonl").read_text().splitlines())
    assert [line["loss"] for line in lines] == pytest.approx(expected, rel=1e-12)
    path = latest(folder / run / "checkpoints")
    assert path is not None
    assert load_all(path).keys() == dict(model.named_parameters()).keys()
    fresh = type(model)().double()
    load_plain(fresh, path)
    for one, other in zip(fresh.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    if config.evaluate_every is None:
        return
    tried = map(json.loads, (folder / run / "held_out.jsonl").read_text().splitlines())
    assert [line["held_out_loss"] for line in tried] == pytest.approx(held_out, rel=1e-12)


def on_ranks(rank_map: Sequence[int], replicas: int = 1) -> list[list[int]]:
    """The ranks of each stage: those of a place follow one another."""
    return [[replicas * place + each for each in range(replicas)] for place in rank_map]


def unequal_times(stages: int, limit: float | None) -> dict[str, object]:
    """Of an order `auto`: no two stages take as long, or hold as much (3 bytes at most)."""
    numbers = range(stages)
    times: dict[str, object] = {
        "forward": [1 + 0.3 * (stage % 3) for stage in numbers],
        "backward_input": [1.5 - 0.2 * (stage % 2) for stage in numbers],
        "backward_weight": [0.4 + 0.5 * (stage % 4) for stage in numbers],
        "links": [
            {"source": stage, "target": stage + 1, "there": 0.2, "back": 0.1 * stage}
            for stage in range(stages - 1)
        ],
        "held_bytes": [1.0 + stage % 3 for stage in numbers],
        "kept_bytes": [0.5] * stages,
    }
    return times if limit is None else times | {"limit_bytes": limit}
