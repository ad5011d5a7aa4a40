"""Mistakes planted in each part of the way from a model to its gradients: the self-check notices
each before training begins, with the same line on all ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import checked_models
import pytest
import torch
from order_runs import prepare
from plans import make_plan
from processes import free_port, run_processes
from torch import Tensor

from pipedream.capture.captured import Captured
from pipedream.capture.export import capture
from pipedream.capture.programs.program import Kept, Program
from pipedream.capture.segment import Segment
from pipedream.comm.buckets import Buckets
from pipedream.comm.rank_info import RankInfo
from pipedream.comm.redistribute import MeshGroups
from pipedream.comm.transport import Transport
from pipedream.graph.errors import UserError
from pipedream.graph.placements.operators import Operator
from pipedream.graph.placements.placement import Partial
from pipedream.graph.plan import Plan
from pipedream.graph.run_config import read_config
from pipedream.runtime.engine.value_exchange import ValueExchange
from pipedream.runtime.local import captures
from pipedream.runtime.optim.weights import Weights
from pipedream.runtime.run.job import Job
from pipedream.runtime.stages.randomness import MinibatchRng
from pipedream.runtime.stages.stage_module import StageModule
from pipedream.runtime.trainer import train
from pipedream.sharding import axis
from pipedream.sharding.rules.strategy import R, Strategy
from pipedream.sharding.steps import Collective, Step

Plant = Callable[[], AbstractContextManager[Any]]


def _in_capture(change: Callable[[torch.fx.GraphModule], None]) -> Plant:
    """Changes what is captured of the model."""

    def wrong(*args: Any, **kwargs: Any) -> Captured:
        captured = capture(*args, **kwargs)
        change(captured.module)
        captured.module.recompile()
        return captured

    return lambda: patch.object(captures, "capture", wrong)


def _other_operator(module: torch.fx.GraphModule) -> None:
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.sigmoid.default):
        node.target = torch.ops.aten.relu.default


def _lost_write(module: torch.fx.GraphModule) -> None:
    (state,) = (each for each in module.graph.find_nodes(op="get_attr") if each.target == "seen")
    for user in list(state.users):
        user.replace_all_uses_with(state)
        module.graph.erase_node(user)


def _no_dropout(module: torch.fx.GraphModule) -> None:
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.dropout.default):
        node.update_arg(1, 0.0)


@contextmanager
def _gradients_of_others() -> Iterator[None]:
    """The second half of a backward pass gives each parameter the gradient of another."""
    right = Program.weight_gradients

    def wrong(self: Program, kept: Kept) -> Iterator[tuple[str, Tensor]]:
        found = list(right(self, kept))
        matrices = [name for name, gradient in found if gradient.dim() == 2]
        others = dict(zip(matrices, reversed(matrices), strict=True))
        yield from ((others.get(name, name), gradient) for name, gradient in found)

    with patch.object(Program, "weight_gradients", wrong):
        yield


@contextmanager
def _input_gradients_twice() -> Iterator[None]:
    right = Program.backward

    def wrong(self: Program, saved: Any, gradients: Any) -> Any:
        of_inputs, kept = right(self, saved, gradients)
        return tuple(None if each is None else 2 * each for each in of_inputs), kept

    with patch.object(Program, "backward", wrong):
        yield


@contextmanager
def _values_exchanged() -> Iterator[None]:
    """Two values of one shape in the other order."""
    right = ValueExchange.send

    def wrong(self: ValueExchange, action: Any, crossings: Any, values: Sequence[Tensor]) -> None:
        right(self, action, crossings, list(reversed(values)))

    with patch.object(ValueExchange, "send", wrong):
        yield


@contextmanager
def _old_message() -> Iterator[None]:
    """A buffer that was received into before, and is used again too early."""
    right, before = Transport.receive, dict[Any, Any]()

    def wrong(self: Transport, channel: Any) -> Any:
        message = right(self, channel)
        kept = before.setdefault(channel, [each.clone() for each in message])
        return kept if [x.shape for x in kept] == [x.shape for x in message] else message

    with patch.object(Transport, "receive", wrong):
        yield


@contextmanager
def _not_added_up() -> Iterator[None]:
    def wrong(self: Buckets, gradients: dict[str, Tensor]) -> None:
        pass

    with patch.object(Buckets, "finish", wrong):
        yield


@contextmanager
def _not_a_mean() -> Iterator[None]:
    right = Weights.take_gradients
    with patch.object(Weights, "take_gradients", lambda self, divisor: right(self, 1)):
        yield


@contextmanager
def _buffers_apart() -> Iterator[None]:
    """The form for the smaller last minibatch has statistics of its own."""
    with patch.object(StageModule, "share", lambda self, other, buffers: _own_buffers(self.piece)):
        yield


def _own_buffers(piece: Segment) -> None:
    for module in piece.module.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.clone())


@contextmanager
def _draws_alike() -> Iterator[None]:
    """Minibatches do not differ in what dropout leaves out, on all ranks but the first."""
    right = MinibatchRng.seed_operator

    def wrong(self: MinibatchRng, position: int) -> None:
        right(self, position + torch.distributed.get_rank())

    with patch.object(MinibatchRng, "seed_operator", wrong):
        yield


@contextmanager
def _terms_for_sums() -> Iterator[None]:
    """A rule says that each device has the whole product where it has a term of it."""
    right = axis.strategies

    def whole(strategy: Strategy) -> Strategy:
        outputs = (R if isinstance(each, Partial) else each for each in strategy.outputs)
        return replace(strategy, outputs=tuple(outputs))

    def wrong(operator: Operator, devices: int, *args: Any) -> tuple[Strategy, ...]:
        return tuple(map(whole, right(operator, devices, *args)))

    with patch.object(axis, "strategies", wrong):
        yield


@contextmanager
def _sums_left_out() -> Iterator[None]:
    """Devices of a mesh go on with their own terms."""
    right = MeshGroups.redistribute

    def wrong(
        self: MeshGroups, local: Tensor, shape: tuple[int, ...], steps: Sequence[Step]
    ) -> Tensor:
        steps = [step for step in steps if step.collective is not Collective.ALL_REDUCE]
        return right(self, local, shape, steps)

    with patch.object(MeshGroups, "redistribute", wrong):
        yield


MESH = "on a mesh"
PLANTED: Mapping[str, tuple[Plant, str, Sequence[int], str]] = {
    "capture: another operator": (_in_capture(_other_operator), "1f1b", (1, 1), "captured"),
    "capture: a write is lost": (_in_capture(_lost_write), "1f1b", (1, 1), "buffer seen"),
    "capture: no dropout": (_in_capture(_no_dropout), "1f1b", (1, 1), "captured"),
    "cut: gradients of others": (_gradients_of_others, "zb-h1", (1, 1), "the gradient of"),
    "cut: gradients twice": (_input_gradients_twice, "zb-h1", (1, 1), "the gradient of"),
    "messages: another order": (_values_exchanged, "1f1b", (1, 1), "the pipeline"),
    "messages: an old one": (_old_message, "1f1b", (2, 1), "the pipeline"),
    "rules: terms for sums": (_terms_for_sums, MESH, (1,), "the pipeline"),
    "meshes: sums left out": (_sums_left_out, MESH, (1,), "the pipeline"),
    "sums: not added up": (_not_added_up, "1f1b", (2, 1), "the gradient of"),
    "sums: not a mean": (_not_a_mean, "1f1b", (2, 1), "the gradient of"),
    "buffers: not shared": (_buffers_apart, "1f1b", (1, 1), "buffer"),
    "random numbers: of another operator": (_draws_alike, "1f1b", (1, 1), "the pipeline"),
}


def _plan(order: str, replicas: Sequence[int], model: str) -> Plan:
    """Cut where both x and y cross. A head is in the first stage."""
    graph = capture(getattr(checked_models, model)(), (torch.randn(4, 6),)).graph
    names = list(graph.order)
    if model == "Auxiliary":
        names.insert(1, names.pop())
    (cut,) = (at for at, name in enumerate(names) if "Sigmoid" in graph.nodes[name].description)
    parts = [names] if order == MESH else [names[: cut + 1], names[cut + 1 :]]
    data = make_plan(graph, parts, replicas, "flush").model_dump(exclude_none=True)
    if order == MESH:
        placements = {"parameters": {"c.weight": "S(1)"}}
        (stage,) = data["stages"]
        stage |= {"mesh": (2,), "ranks": (0, 1), "placements": placements}
        data["cluster"]["machines"] = (2,)
    elif order != "1f1b":
        data["order"] = order
    for stage in data["stages"]:
        stage["in_flight"] = 4
    return Plan.model_validate(data)


def _job(folder: Path, order: str, replicas: Sequence[int], model: str = "Varied") -> Job:
    changes: dict[str, object] = {"drop_last": False, "batch_size": 5, "evaluate_every": None}
    prepare(folder, "Chain", "zb-h1", [[0], [1]], **changes)
    text = (
        (folder / "run.yaml").read_text().replace("small_models:Chain", f"checked_models:{model}")
    )
    loss = "loss: checked_models:of_the_first\n" * (model == "Auxiliary")
    (folder / "run.yaml").write_text(text + loss)
    config = read_config(folder / "run.yaml")
    plan = _plan(order, replicas, model)
    run = folder / f"{model}-{order}-{'-'.join(map(str, replicas))}"
    return Job(plan, config, folder, run, schedule="flush", epochs=1)


def _run(_: int, __: int, name: str, job: Job, port: int) -> list[str]:
    """How the run with this mistake ends, on all ranks."""
    # What is captured is compared on rank 0, before the others are met.
    ranks = 1 if name.startswith("capture") else job.plan.workers
    with PLANTED[name][0]() if name in PLANTED else nullcontext():
        return run_processes(_end, ranks, job, port, seconds=60, fork=True)


def _end(rank: int, _: int, job: Job, port: int) -> str:
    workers = job.plan.workers
    try:
        train(job, RankInfo(rank, workers, rank, workers, "127.0.0.1", port))
    except UserError as error:
        return error.format_message()
    except Exception as error:
        return repr(error)
    return "trained"


def ends(name: str, job: Job) -> Sequence[str]:
    """How the run ends on each rank, in processes of its own: what is planted stays there."""
    (lines,) = run_processes(_run, 1, name, job, free_port(), seconds=80)
    return cast("Sequence[str]", lines)


@pytest.mark.one_in(10)
@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_noticed(tmp_path: Path, name: str) -> None:
    _, order, replicas, expected = PLANTED[name]
    lines = ends(name, _job(tmp_path, order, replicas))
    told = [line for line in lines if line.startswith("self-check: ")]
    assert len(told) == len(lines), lines
    assert len(set(told)) == 1
    assert expected in told[0]


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "replicas"), [("1f1b", (1, 1)), ("zb-h1", (1, 1)), ("1f1b", (2, 1)), (MESH, (1,))]
)
def test_without_a_mistake_it_trains(tmp_path: Path, order: str, replicas: tuple[int, ...]) -> None:
    assert set(ends("none", _job(tmp_path, order, replicas))) == {"trained"}


@pytest.mark.slow
def test_zeros_where_the_model_has_no_gradient_are_noticed(tmp_path: Path) -> None:
    """The loss ignores what the first stage sends to the last: its gradient comes back as zeros,
    which weight decay and momentum do not take for none.
    """
    told = set(ends("none", _job(tmp_path, "1f1b", (1, 1), "Auxiliary")))
    assert len(told) == 1
    assert re.match(r"self-check: the gradient of head\.\w+ .* is there, and .* not", told.pop())
