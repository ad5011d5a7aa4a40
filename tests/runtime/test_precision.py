"""Autocast: what stages send is of the types that were agreed, and they learn as a loop does."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from one_rank import Data, OneRank
from plans import cut, make_plan
from processes import free_port, run_processes
from torch import Tensor, fx, nn
from torch.nn import functional as F

from pipedream.capture.captured import Captured
from pipedream.capture.compute_settings import IN_FULL, Precision
from pipedream.capture.export import capture
from pipedream.comm.rank_info import RankInfo
from pipedream.graph.errors import UserError
from pipedream.graph.plan import Plan
from pipedream.runtime.data.batch import Batch
from pipedream.runtime.pipeline import Pipeline

BATCHES, MICROBATCHES = 3, 2
LOWER = Precision("bfloat16")


class Attention(nn.Module):
    """Operators that autocast computes in the lower type (linear, matmul), in float32 (softmax on
    a GPU, sums of both), or in the type that they are given; and code that asks for types.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 8)
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = self.q(normed), self.k(normed), self.v(normed)
        size = x.shape[1], x.shape[1]
        mask = torch.full(size, torch.finfo(q.dtype).min, device=x.device).triu(1).to(q)
        weights = (q @ k.transpose(1, 2) + mask).softmax(-1, dtype=torch.float32).to(q.dtype)
        return x + self.out(weights @ v)


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(Attention(), Attention(), nn.Linear(8, 8))


def _batches(examples: int = 4) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    shape = (2 * BATCHES, examples, 5, 8)
    numbers = torch.randn(shape, generator=draw)
    return list(zip(numbers[::2], numbers[1::2], strict=True))


class _Types(fx.Interpreter):
    """Runs a graph and notes the types of its values."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            n.meta["computed"] = result.dtype
        return result


def _computed(captured: Captured, x: Tensor) -> dict[str, torch.dtype]:
    with captured.precision.computing():
        _Types(captured.module).run(x)
    known = captured.module.graph.nodes
    return {node.name: node.meta["computed"] for node in known if node.name in captured.values}


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [None, "bfloat16", "float16"])
def test_a_capture_knows_the_types_that_are_computed(autocast: str | None) -> None:
    """Whatever is set around the capture: a training loop's own autocast, say."""
    x = _batches()[0][0]
    with torch.autocast("cpu", torch.bfloat16):
        captured = capture(_model(), (x,), precision=Precision(autocast))
        types = {name: value.dtype for name, value in captured.values.items()}
        assert types == _computed(captured, x)
    assert captured.graph.fingerprint == capture(_model(), (x,)).graph.fingerprint


def test_types_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU autocast has layer norm in float32 that a CPU computes in the type it is given.
    Without a GPU torch has no autograd for tensors that claim to be on one.
    """
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), _batches()[0][0]
    model.requires_grad_(torch.cuda.is_available())
    types = {}
    for device in ("cpu", "cuda"):
        captured = capture(model, (x,), precision=Precision("float16", torch.device(device)))
        types[device] = [value.dtype for value in captured.values.values()]
    assert types["cpu"] == [torch.float32, torch.float16, torch.float16]
    assert types["cuda"] == [torch.float32, torch.float16, torch.float32]


def _plan(stages: int) -> Plan:
    """Of a profile without autocast."""
    graph = capture(_model(), (_batches()[0][0],)).graph
    return make_plan(graph, cut(graph, stages), (1,) * stages, "flush")


def _train(rank: int, ranks: int, plan: Plan, port: int) -> tuple[list[float], list[Any]]:
    torch.set_num_threads(1)
    os.environ |= RankInfo(rank, ranks, rank, ranks, "127.0.0.1", port).variables()
    model = _model()
    pipeline = Pipeline(
        model, plan, F.mse_loss, microbatches=MICROBATCHES, device="cpu", autocast="bfloat16"
    )
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for x, y in _batches():
        loss = pipeline(x, target=y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [each.detach().numpy() for each in pipeline.gather().parameters()]


def _train_plain() -> tuple[list[float], list[Tensor]]:
    model = _model()
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for x, y in _batches():
        loss = 0.0
        for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                own = F.mse_loss(model(part), target)
            own.backward()
            loss += own.item() / MICROBATCHES
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= MICROBATCHES
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return losses, [each.detach() for each in model.parameters()]


@pytest.mark.slow
def test_a_pipeline_learns_what_a_loop_under_autocast_does() -> None:
    """To the last bit. Ranks expected float32 where others sent bfloat16, and took what came."""
    expected = _train_plain()
    for losses, weights in run_processes(_train, 2, _plan(2), free_port()):
        assert losses == expected[0]
        for weight, plain in zip(weights, expected[1], strict=True):
            assert torch.equal(torch.from_numpy(weight), plain)


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("autocast", ["bfloat16", "float16"])
def test_minibatches_of_any_shape_have_these_types(autocast: str) -> None:
    data = Data([Batch((x,), y) for n in (4, 3) for x, y in _batches(n)])
    whole = OneRank(_model(), data, stages=1, autocast=autocast, varying=True).train()
    stages = OneRank(
        _model(), data, stages=3, autocast=autocast, varying=True, halved=lambda _, __: False
    ).train()
    assert stages.losses == whole.losses
    for name, weight in whole.state.items():
        assert torch.equal(stages.state[name], weight), name


def test_a_message_of_another_type_is_refused() -> None:
    """A stage that computes in another precision than was captured; the types were unchecked."""
    x, y = _batches()[0]
    rank = OneRank(_model(), Data([Batch((x,), y)]), halved=lambda _, __: False)
    for module in rank.modules.values():
        compute = module.compute
        object.__setattr__(module, "compute", _lowered(compute))
    with pytest.raises(UserError) as error:
        rank.train()
    said = error.value.format_message()
    assert said.startswith("stage 0: ")
    assert "is [4, 5, 8] of bfloat16 where stage 1 waits for [4, 5, 8] of float32" in said


def _lowered(compute: Any) -> Any:
    def run(*args: Any) -> Any:
        return [result.bfloat16() for result in compute(*args)]

    return run


def test_autocast_of_the_caller_is_not_ignored() -> None:
    """A loop in `torch.autocast` trained in float32, or by casts of weights that had changed."""
    x, y = _batches()[0]
    pipeline = Pipeline(_model(), _plan(1), F.mse_loss, device="cpu")
    for dtype, remedy in (
        (torch.bfloat16, "give it autocast='bfloat16'"),
        (torch.float16, "use bfloat16"),
    ):
        with torch.autocast("cpu", dtype), pytest.raises(UserError, match=remedy):
            pipeline(x, target=y)


def test_an_autocast_that_wants_a_scaler_is_refused() -> None:
    wrong: Any = "float16"
    with pytest.raises(UserError, match="autocast='float16': Pipeline takes 'bfloat16' alone"):
        Pipeline(_model(), _plan(1), F.mse_loss, device="cpu", autocast=wrong)


def test_casts_of_weights_are_not_kept_from_call_to_call() -> None:
    """Within the caller's context torch would keep them, of weights that an optimizer changes."""
    model = _model()
    module = OneRank(model, Data([Batch((_batches()[0][0],), None)]), 1, autocast="bfloat16")
    (stage,) = module.modules.values()
    weights = {n: p.detach().requires_grad_() for n, p in stage.piece.module.named_parameters()}
    with torch.autocast("cpu", torch.bfloat16):
        (first,) = stage.compute(weights, _batches()[0][:1])
        for weight in weights.values():
            weight.data.mul_(0.5)
        (second,) = stage.compute(weights, _batches()[0][:1])
    (fresh,) = stage.compute(weights, _batches()[0][:1])
    assert torch.equal(second, fresh)
    assert not torch.equal(first, fresh)


def test_precision_is_in_full_by_default() -> None:
    assert capture(nn.Linear(2, 2), (torch.ones(1, 2),)).precision == IN_FULL
