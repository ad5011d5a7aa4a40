"""Loops that do more than one call, one backward, one step; and models that change in between.

Each is a story, told to a pipeline of two ranks and to the plain model in the same process: losses
are the same, and so is each gradient that the rank has.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plans import cut, make_plan
from processes import free_port, run_processes
from torch import Tensor, nn
from torch.nn import functional as F

from pipedream.capture.compute_settings import eval_mode
from pipedream.capture.export import capture
from pipedream.comm.rank_info import RankInfo
from pipedream.graph.errors import UserError
from pipedream.graph.plan import Plan
from pipedream.runtime.pipeline import Pipeline

LossOf = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """Two halves, with batch norm in both, and an attribute that its forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.0)
        self.b, self.late = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.c = nn.Linear(6, 6)
        self.sharpness = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(torch.tanh(self.norm(self.a(x)) * self.sharpness))
        return self.c(torch.tanh(self.late(self.b(x))))


def _net() -> Net:
    torch.manual_seed(5)
    return Net().double()


def _plan(count: int = 2) -> Plan:
    graph = capture(_net(), (_batch(0),)).graph
    return make_plan(graph, cut(graph, count), (1,) * count, "flush")


def _batch(seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(8, 6, dtype=torch.float64, generator=draw)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


def _as_rank(rank: int, ranks: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= RankInfo(rank, ranks, rank, ranks, "127.0.0.1", port).variables()


CHANGES: dict[str, Callable[[Net], object]] = {
    "nothing": lambda net: None,
    "its first half is frozen": lambda net: net.a.requires_grad_(False),
    "all of the first stage is frozen": lambda net: (net.a, net.norm.requires_grad_(False)),
    "it is thawed": lambda net: (net.a.requires_grad_(True), net.norm.requires_grad_(True)),
    "the second half is frozen": lambda net: [
        part.requires_grad_(False) for part in (net.b, net.late, net.c)
    ],
    "all is thawed": lambda net: net.requires_grad_(True),
    "a bias alone is frozen": lambda net: net.c.bias.requires_grad_(False),
    "batch norm is in eval mode": lambda net: net.norm.eval(),
    "all is in eval mode": lambda net: net.eval(),
    "all is in training mode": lambda net: net.train(),
    "an attribute changes": lambda net: setattr(net, "sharpness", 0.5),
    "the head is replaced": lambda net: setattr(net, "c", _head()),
    "a weight is replaced": lambda net: setattr(net.b, "weight", _head().weight),
    "data are assigned": lambda net: setattr(net.b.weight, "data", _head().weight.data * 3),
    "statistics are reset": lambda net: net.norm.reset_running_stats(),
    "statistics are replaced": lambda net: setattr(
        net.norm.eval(), "running_mean", torch.ones(6).double()
    ),
    "weights are loaded": lambda net: net.load_state_dict(_net().state_dict()),
    "weights are tied": lambda net: setattr(net.c, "weight", net.a.weight),
    "and tied no more": lambda net: setattr(net.c, "weight", _head().weight),
    "it is cast": lambda net: net.float(),
    "and back": lambda net: net.double(),
    "a hook is added": lambda net: net.a.register_forward_hook(lambda _m, _a, out: out * 2),
}


def _head() -> nn.Linear:
    torch.manual_seed(9)
    return nn.Linear(6, 6).double()


def _several(loss_of: LossOf) -> list[Tensor]:
    losses = [loss_of(_batch(seed)) for seed in (0, 1)]
    (losses[0] + losses[1]).backward()
    return losses


def _scaled(loss_of: LossOf) -> list[Tensor]:
    loss = loss_of(_batch(0))
    (loss**2 - 0.5 * loss_of(_batch(1))).backward()
    return [loss]


def _retained(loss_of: LossOf) -> list[Tensor]:
    loss = loss_of(_batch(0))
    loss.backward(retain_graph=True)
    (0.25 * loss).backward(retain_graph=True)
    loss.backward()
    return [loss]


def _in_another_order(loss_of: LossOf) -> list[Tensor]:
    first, second = loss_of(_batch(0)), loss_of(_batch(1))
    second.backward()
    loss_of(_batch(2))  # its backward is never called
    (3 * first).backward()
    return [first, second]


def _without_gradients(loss_of: LossOf) -> list[Tensor]:
    with torch.no_grad():
        seen = loss_of(_batch(3))
    assert not seen.requires_grad
    loss = loss_of(_batch(0))
    loss.backward()
    return [seen, loss]


def _in_inference_mode(loss_of: LossOf) -> list[Tensor]:
    with torch.inference_mode():
        seen = loss_of(_batch(3).clone())
    return [seen.clone()]


LOOPS: dict[str, Callable[[LossOf], list[Tensor]]] = {
    "two losses are added": _several,
    "losses are scaled": _scaled,
    "a graph is retained": _retained,
    "the second comes first": _in_another_order,
    "one call is without gradients": _without_gradients,
    "one call is in inference mode": _in_inference_mode,
}


def _differences(pipeline: Pipeline, net: Net, plain: Net, losses: Any) -> list[str]:
    """What is not the same; each gradient is on one rank at least, and on no other."""
    told = [f"losses {losses}"] if not torch.allclose(*losses, rtol=0, atol=1e-6) else []
    assert pipeline.now is not None
    own = {name for stage in pipeline.stages for name in pipeline.now.parameters(stage)}
    for (name, here), (_, there) in zip(
        net.named_parameters(), plain.named_parameters(), strict=True
    ):
        expected = there.grad if name in own else None
        if (here.grad is None) != (expected is None):
            told.append(f"{name} {'has no' if here.grad is None else 'has a'} gradient")
        elif expected is not None and not torch.allclose(here.grad, expected, atol=1e-7):  # type: ignore
            told.append(f"{name} has another gradient")
    return told


def _evaluated(pipeline: Pipeline, net: Net, plain: Net) -> list[str]:
    modes = [module.training for module in net.modules()]
    x = _batch(4).to(net.a.weight)
    tried = pipeline.evaluate(x, target=x.flip(1))
    assert modes == [module.training for module in net.modules()]
    with torch.no_grad(), eval_mode(plain):
        same = torch.allclose(tried.to(x), _loss(plain(x), x.flip(1)), rtol=0, atol=1e-6)
    return [] if same else ["evaluation"]


def _tell(rank: int, ranks: int, plan: Plan, port: int) -> dict[str, list[str]]:
    """All stories, one after the other, with a step of the optimizer after each."""
    _as_rank(rank, ranks, port)
    net, plain = _net(), _net()
    pipeline = Pipeline(net, plan, _loss, microbatches=1, device="cpu")
    told = {}

    def piped(x: Tensor) -> Tensor:
        x = x.to(net.a.weight.dtype)
        return pipeline(x, target=x.flip(1))

    def plainly(x: Tensor) -> Tensor:
        x = x.to(net.a.weight.dtype)
        return _loss(plain(x), x.flip(1))

    stories = [(name, change, _several) for name, change in CHANGES.items()]
    stories += [(name, CHANGES["nothing"], loop) for name, loop in LOOPS.items()]
    for name, change, loop in stories:
        pipeline.gather()  # not needed where a rank's own parameters change alone
        change(net), change(plain)
        losses = [torch.stack([x.double() for x in loop(f)]).detach() for f in (piped, plainly)]
        told[name] = _differences(pipeline, net, plain, losses)
        for model in (net, plain):
            torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01).step()
            model.zero_grad(set_to_none=name in CHANGES)
        told[name] += _evaluated(pipeline, net, plain)
    told["captured"] = [str(pipeline.staged.cache_info().misses)]
    return told


@pytest.mark.slow
def test_calls_and_models_that_change() -> None:
    """Changes after the first step were ignored, and gradients were those of the last call."""
    for told in run_processes(_tell, 2, _plan(), free_port()):
        assert int(told.pop("captured")[0]) <= 2 * len(CHANGES)
        assert {name: each for name, each in told.items() if each} == {}


class Scaled(nn.Module):
    """Attributes that torch.export puts copies in the place of."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a = nn.LayerNorm((6,)), nn.Linear(6, 6)
        self.scales, self.named, self.seen = [1.0, 2.0], {"shift": (0.5,)}, {"a", "norm"}

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x) * self.scales[0] + self.named["shift"][0]
        return self.a(x) * self.scales[1]


@pytest.mark.slow
def test_a_model_that_does_not_change_is_captured_once() -> None:
    """It was captured in each call, since the capture itself had put copies of its lists there."""
    torch.manual_seed(0)
    net = Scaled()
    batches = [torch.randn(size, 6) for size in (4, 4, 3, 4, 3)]
    graph = capture(net, (batches[0],)).graph
    plan = make_plan(graph, cut(graph, 1), (1,), "flush")
    pipeline = Pipeline(net, plan, F.mse_loss, microbatches=1, device="cpu")
    for x in batches:
        assert pipeline(x, target=x) == F.mse_loss(net(x), x).double()
    assert pipeline.staged.cache_info().misses == 1
    assert len(pipeline.now.forms.captures) == 2
    net.scales[1] = 3.0
    assert pipeline(x, target=x) == F.mse_loss(net(x), x).double()
    assert pipeline.staged.cache_info().misses == 2


def _tokens(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, ignore_index=-100)


def _ignored(rank: int, ranks: int, plan: Plan, port: int) -> list[list[float]]:
    """Labels of which whole microbatches have none: losses of a call and of an evaluation, and
    whether gradients are those of the plain model.
    """
    _as_rank(rank, ranks, port)
    told = []
    for ignored in (range(2), range(1, 5), range(8)):
        net, plain = _net().eval(), _net().eval()
        pipeline = Pipeline(net, plan, _tokens, microbatches=4, device="cpu")
        x, target = _batch(0), torch.arange(8) % 6
        target[list(ignored)] = -100
        counted = (target != -100).double()
        weights = counted / counted.sum()
        loss = pipeline(x, target=target, weights=weights)
        expected = _tokens(plain(x), target)
        tried = pipeline.evaluate(x, target=target, weights=weights)
        loss.backward(), expected.backward()
        same = _differences(pipeline, net, plain, [torch.zeros(1), torch.zeros(1)]) == []
        told.append([float(loss - expected), float(tried - expected), float(same)])
    return told


@pytest.mark.slow
def test_a_microbatch_in_which_nothing_counts() -> None:
    """Its loss is 0 / 0, and made that of the minibatch NaN; so it is where nothing counts at all,
    as for the plain model.
    """
    for told in run_processes(_ignored, 2, _plan(), free_port()):
        assert told[:2] == [pytest.approx([0.0, 0.0, 1.0], abs=1e-9)] * 2
        assert [value != value for value in told[2]] == [True, True, False]
        assert told[2][2] == 1.0


def _on_one_rank(rank: int, ranks: int, plan: Plan, port: int) -> list[str]:
    """What is said where ranks differ, after a call in which they did not."""
    _as_rank(rank, ranks, port)
    said = []
    stories: dict[str, Callable[[Net], object]] = {
        "frozen": lambda net: rank == 0 and net.c.requires_grad_(False),
        "eval": lambda net: net.norm.train(rank == 0),
        "attribute": lambda net: setattr(net, "sharpness", 1.0 + rank),
        "replaced": lambda net: setattr(net, "c", nn.Linear(6, 6).double()),
        "tied": lambda net: setattr(net.c, "weight", net.a.weight),
        "dropout": lambda net: setattr(net.drop, "p", 0.5),
    }
    torch.manual_seed(rank)
    for change in stories.values():
        net = _net()
        pipeline = Pipeline(net, plan, _loss, microbatches=1, device="cpu")
        pipeline(_batch(0), target=_batch(1)).backward()
        torch.manual_seed(rank)
        change(net)
        with pytest.raises(UserError) as error:
            pipeline(_batch(0), target=_batch(1))
        said.append(error.value.format_message())
    net, pipeline = _net(), Pipeline(_net(), plan, _loss, microbatches=1, device="cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(UserError) as error:
        pipeline(_batch(0), target=_batch(1))
    return [*said, error.value.format_message()]


@pytest.mark.thorough
@pytest.mark.slow
def test_a_change_on_one_rank_is_refused_on_all() -> None:
    """Ranks would wait for messages that nobody sends, or train two models."""
    expected = [
        "c.weight learns: False on rank 0, True on rank 1",
        "norm is in training mode: True on rank 0, False on rank 1",
        "the same calls run other operators",
        "the ranks have different models: make new parameters alike on all ranks",
        "a parameter is in the stage of another rank, too: call gather()",
        "this plan was made for another model",
        "within torch.autocast of bfloat16",
    ]
    for said in run_processes(_on_one_rank, 2, _plan(), free_port()):
        assert len(said) == len(expected)
        for message, part in zip(said, expected, strict=True):
            assert part in message
            assert "\n" not in message
