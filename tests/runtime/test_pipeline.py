"""A loop of the user's own: gradients are those of the plain model, whatever the plan."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import sharded_models
import small_models
import strict_nccl
import torch
from commands import typed
from joint_models import LENGTH, WORDS
from order_runs import plan_of
from plans import cut, make_plan
from processes import free_port, run_processes
from sharded_runs import PROFILE, write_config
from torch import Tensor, nn
from torch.nn import functional as F

from pipedream.capture.export import capture
from pipedream.capture.sources.minibatch import in_type
from pipedream.comm.rank_info import RankInfo
from pipedream.graph.errors import UserError
from pipedream.graph.placements.placement import Mesh, device_count
from pipedream.graph.plan import Plan
from pipedream.runtime.pipeline import Pipeline

BATCHES = [16, 16, 10, 3]
"""Examples of each minibatch: the later ones make other shapes, and microbatches that differ."""


def _model(name: str) -> nn.Module:
    torch.manual_seed(5)
    model: nn.Module = getattr(small_models, name)()
    return model._apply(lambda tensor: in_type(tensor, torch.float64))


def _batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    return [
        (torch.randn(n, 6, dtype=torch.float64, generator=draw), torch.randn(n, 6, generator=draw))
        for n in BATCHES
    ]


def _plan(name: str, replicas: tuple[int, ...]) -> Plan:
    graph = capture(_model(name), (torch.randn(4, 6, dtype=torch.float64),)).graph
    return make_plan(graph, cut(graph, len(replicas)), replicas, "flush")


def _mean_square(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target.to(output.dtype))


def _as_rank(rank: int, ranks: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= RankInfo(rank, ranks, rank, ranks, "127.0.0.1", port).variables()


def _train(rank: int, ranks: int, name: str, plan: Plan, port: int) -> Any:
    """Losses, norms and the weights at the end, by a loop as a user would write it."""
    _as_rank(rank, ranks, port)
    model = _model(name)
    pipeline = Pipeline(model, plan, _mean_square, microbatches=4, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses, norms = [], []
    for x, y in _batches():
        for part in (0.25, 0.75):  # gradients add up
            loss = pipeline(x, target=y)
            (part * loss).backward()
            losses.append(loss.item())
        norms.append(float(pipeline.clip_grad_norm_(0.1)))
        optimizer.step()
        optimizer.zero_grad()
    tried = float(pipeline.evaluate(x, target=y))
    weights = pipeline.gather().state_dict()
    return losses, norms, tried, {name: tensor.numpy() for name, tensor in weights.items()}


def _plain(name: str) -> Any:
    model = _model(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses, norms = [], []
    for x, y in _batches():
        for part in (0.25, 0.75):
            loss = _mean_square(model(x), y)
            (part * loss).backward()
            losses.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return losses, norms, float(_mean_square(model.eval()(x), y)), model.state_dict()


@pytest.mark.one_in(12)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["Chain", "Tied", "FrozenFirst"])
@pytest.mark.parametrize("replicas", [(1,), (1, 1), (2, 1), (1, 2)])
def test_a_loop_learns_what_the_plain_model_would(name: str, replicas: tuple[int, ...]) -> None:
    plan = _plan(name, replicas)
    expected = _plain(name)
    results = run_processes(_train, sum(replicas), name, plan, free_port())
    for losses, norms, tried, weights in results:
        assert losses == pytest.approx(expected[0], abs=1e-12)
        assert norms == pytest.approx(expected[1], rel=1e-9)
        assert tried == pytest.approx(expected[2], abs=1e-12)
        for key, tensor in expected[3].items():
            torch.testing.assert_close(torch.from_numpy(weights[key]), tensor, rtol=0, atol=1e-10)


def _on_meshes(
    plan: Plan, meshes: Sequence[Mesh | None], patterns: Mapping[str, str]
) -> tuple[Plan, int]:
    """The plan with each replica on a mesh, parameters placed so; and its ranks."""
    data, ranks = plan.model_dump(exclude_none=True), 0
    for stage, mesh in zip(data["stages"], meshes, strict=True):
        count = len(stage["ranks"]) * device_count(mesh or ())
        stage["ranks"] = tuple(range(ranks, ranks + count))
        ranks += count
        if mesh is not None:
            stage |= {"mesh": mesh, "placements": {"parameters": dict(patterns)}}
    data["cluster"]["machines"] = (ranks,)
    return Plan.model_validate(data), ranks


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "replicas", "meshes", "patterns"),
    [
        ("Chain", (1,), ((2,),), {"*weight": "S(0)"}),
        ("Chain", (1, 1), ((2,), None), {"*weight": "S(1)"}),
        ("Tied", (1, 1), (None, (2,)), {"*weight": "S(0)"}),
        ("FrozenFirst", (2,), ((2,),), {"*weight": "S(0)", "*bias": "S(0)"}),
    ],
)
def test_a_loop_on_meshes_learns_what_the_plain_model_would(
    name: str,
    replicas: tuple[int, ...],
    meshes: tuple[Mesh | None, ...],
    patterns: Mapping[str, str],
) -> None:
    """Minibatches of several sizes, gradients that add up, clipping, evaluation."""
    plan, ranks = _on_meshes(_plan(name, replicas), meshes, patterns)
    expected = _plain(name)
    for losses, norms, tried, weights in run_processes(_train, ranks, name, plan, free_port()):
        assert losses == pytest.approx(expected[0], abs=1e-12)
        assert norms == pytest.approx(expected[1], rel=1e-9)
        assert tried == pytest.approx(expected[2], abs=1e-12)
        for key, tensor in expected[3].items():
            torch.testing.assert_close(torch.from_numpy(weights[key]), tensor, rtol=0, atol=1e-10)


def _language_losses(loss_of: Callable[[Tensor, Tensor], Tensor], model: nn.Module) -> list[float]:
    """Those of a few steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, draw = [], torch.Generator().manual_seed(3)
    for _ in range(4):
        words = torch.randint(0, WORDS, (8, LENGTH + 1), generator=draw)
        loss = loss_of(words[:, :-1], words[:, 1:])
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _language_model() -> nn.Module:
    torch.manual_seed(5)
    return sharded_models.TiedWords().double()


def _train_planned(rank: int, ranks: int, path: Path, port: int) -> list[float]:
    _as_rank(rank, ranks, port)
    model = _language_model()
    pipeline = Pipeline(model, path, sharded_models.next_words, microbatches=2, device="cpu")
    return _language_losses(lambda x, y: pipeline(x, target=y), model)


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("mesh", ["2", "2,2"])
def test_a_loop_takes_the_meshes_that_pd_optimize_finds(tmp_path: Path, mesh: str) -> None:
    """The loss is no part of the last stage here, and is of the plan's operators."""
    write_config(tmp_path, "TiedWords", microbatches=2, evaluate_every=None)
    links = ["--bandwidth", "1TB", "--schedule", "flush", "--microbatches", "2"]
    ranks = 2 ** len(mesh.split(","))
    for words in (
        PROFILE,
        ["pd-optimize", "graph.txt", "--machines", str(ranks), "--mesh", mesh, *links],
    ):
        done = typed(tmp_path, words)
        assert done.code == 0, done.error
    model = _language_model()
    expected = _language_losses(lambda x, y: sharded_models.next_words(model(x), y), model)
    path = tmp_path / "plan/plan.json"
    for losses in run_processes(_train_planned, ranks, path, free_port()):
        assert losses == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
def test_buffers_that_devices_have_in_parts_are_the_models_again() -> None:
    """Statistics of which each device has some columns; in a loop they are whole."""
    plan = _plan("Averaging", (1,))
    (expected,) = run_processes(_train, 1, "Averaging", plan, free_port())
    divided, ranks = _on_meshes(plan, ((2,),), {"mean": "S(0)", "*.weight": "S(0)"})
    for losses, norms, tried, weights in run_processes(
        _train, ranks, "Averaging", divided, free_port()
    ):
        assert losses == pytest.approx(expected[0], abs=1e-12)
        assert norms == pytest.approx(expected[1], rel=1e-9)
        assert tried == pytest.approx(expected[2], abs=1e-12)
        assert weights.keys() == expected[3].keys()
        for key, array in expected[3].items():
            assert weights[key] == pytest.approx(array, abs=1e-10), key


def _train_as_with_nccl(*args: Any) -> Any:
    strict_nccl.install()
    return _train(*args)


@pytest.mark.slow
def test_a_loop_does_not_hang_in_the_order_that_nccl_has() -> None:
    """Passes that are done first leave buffers as they were."""
    plan = _plan("Averaging", (2, 1))
    gloo, nccl = (
        run_processes(train, 3, "Averaging", plan, free_port())
        for train in (_train, _train_as_with_nccl)
    )
    for one, other in zip(gloo, nccl, strict=True):
        assert one[:3] == other[:3]
        assert all((one[3][name] == other[3][name]).all() for name in one[3])


@pytest.mark.thorough
@pytest.mark.slow
def test_complex_weights_learn_what_the_plain_model_would() -> None:
    test_a_loop_learns_what_the_plain_model_would("Filtered", (2, 1))


def _mistake(rank: int, ranks: int, plan: Plan, port: int, which: str) -> str:
    _as_rank(rank, ranks, port)
    x, y = _batches()[0]
    torch.manual_seed(rank if which == "models" else 0)
    model = small_models.Chain().double()
    pipeline = Pipeline(model, plan, _mean_square, microbatches=4, device="cpu")
    if which == "minibatches":
        x = x + rank
    with pytest.raises(UserError) as error:
        pipeline(x, target=y)
    return error.value.format_message()


@pytest.mark.slow
@pytest.mark.parametrize("which", ["models", "minibatches"])
def test_ranks_that_differ_are_told(which: str) -> None:
    for said in run_processes(_mistake, 2, _plan("Chain", (1, 1)), free_port(), which):
        assert f"the ranks have different {which}: " in said


def test_a_plan_for_other_ranks_is_refused() -> None:
    with pytest.raises(UserError, match="the plan is for 2 workers and 1 were started"):
        Pipeline(_model("Chain"), _plan("Chain", (1, 1)), _mean_square)


def test_a_plan_that_divides_the_optimizers_state_is_refused() -> None:
    plan = _plan("Chain", (1, 1))
    stages = tuple(each.model_copy(update={"zero": each.stage == 1}) for each in plan.stages)
    with pytest.raises(UserError, match=r"stage 1 of the plan has zero: .* --zero never$"):
        Pipeline(_model("Chain"), plan.model_copy(update={"stages": stages}), _mean_square)


def test_a_plan_with_several_stages_on_a_rank_is_refused() -> None:
    """It ended in an assertion, when the first minibatch came."""
    plan = plan_of("Chain", "zb-v", [[0], [1], [1], [0]], 4)
    with pytest.raises(UserError, match=r"several stages on a rank \(order zb-v\), which pd-train"):
        Pipeline(small_models.Chain(), plan, F.mse_loss)
