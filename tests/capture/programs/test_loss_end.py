"""The loss as the end of a stage's passes: the same gradients, and no logits that are gathered."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipedream.capture.captured import Captured
from pipedream.capture.export import capture
from pipedream.capture.programs.attribution import attribute
from pipedream.capture.programs.description import describe
from pipedream.capture.programs.divisible import sum_means
from pipedream.capture.programs.joint import CannotDivide, Joint, joint
from pipedream.capture.programs.loss_end import LossEnd, Target
from pipedream.capture.programs.program import Program
from pipedream.capture.segment import Segment, segment
from pipedream.graph.cluster import Link
from pipedream.graph.placements.placement import Replicate, Shard
from pipedream.graph.placements.requests import Requests
from pipedream.sharding.assignment import Assignment, LinkedMesh, redistributions
from pipedream.sharding.propagate import propagate

CPU = torch.device("cpu")
CLASSES = torch.tensor([0, 3, 1, 3, 2, 0])


class TwoHeads(nn.Module):
    """Returns a dict, of which the loss takes what it wants; `x` passes through as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.logits, self.value = nn.Linear(5, 8), nn.Linear(8, 4), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.up(x))
        return {"logits": self.logits(hidden), "value": self.value(hidden), "x": x}


def with_weights(output: Any, target: Any) -> Tensor:
    return F.cross_entropy(output["logits"], target, weight=torch.arange(1.0, 5.0).double())


def smoothed(output: Any, target: Any) -> Tensor:
    return F.cross_entropy(output["logits"], target, label_smoothing=0.1)


def of_all(output: Any, target: Any) -> Tensor:
    """With a part that learns nothing, and one of an input."""
    with torch.no_grad():
        scale = output["value"].square().mean()
    distance = (output["value"] - output["x"].sum(1, keepdim=True)).square().mean()
    return scale * F.cross_entropy(output["logits"], target) + distance


def of_pair(output: Any, target: Any) -> Tensor:
    classes, values = target["classes"], target["values"]
    return F.cross_entropy(output["logits"], classes) + F.mse_loss(output["value"], values)


PAIR = {"classes": CLASSES, "values": torch.linspace(0, 1, 6).double()[:, None]}
LOSSES: dict[str, tuple[Callable[[Any, Any], Tensor], Any]] = {
    "weights": (with_weights, CLASSES),
    "smoothed": (smoothed, CLASSES),
    "all": (of_all, CLASSES),
    "pair": (of_pair, PAIR),
}


def captured(model: nn.Module, x: Tensor) -> tuple[Captured, Segment]:
    whole = capture(model, (x,))
    return whole, segment(whole, whole.working, keep=whole.outputs)


def traced(model: nn.Module, x: Tensor, loss: Any, target: Any) -> tuple[Joint, list[Tensor]]:
    """The passes with the loss, and their inputs."""
    whole, piece = captured(model, x)
    end, tensors = LossEnd(loss, whole.outputs, whole.out_spec), Target.of(target)
    assert tensors is not None
    names = end.inputs(piece, tensors)
    values = dict(zip(whole.inputs, [x], strict=True)) | dict(tensors.tensors)
    inputs = [values[name] for name in names]
    state = dict(piece.module.named_parameters())
    wants = [False] * len(names)
    of_loss = end.end(piece, names, tensors)
    return joint(piece.module, state, inputs, wants, nullcontext(), of_loss), inputs


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradients_are_those_of_the_loss(name: str) -> None:
    """With means as sums, as they are divided."""
    loss, target = LOSSES[name]
    torch.manual_seed(0)
    model, x = TwoHeads().double(), torch.randn(6, 5).double()
    expected = loss(model(x), target)
    expected.backward()
    passes, inputs = traced(model, x, loss, target)
    program = Program(sum_means(passes))
    state = dict(model.named_parameters())
    (value,), saved = program.forward(state, inputs)
    _, kept = program.backward(saved, [torch.tensor(2.0).double()])  # a scale of the loss
    gradients = dict(program.weight_gradients(kept))
    torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=1e-12)
    for key, parameter in state.items():
        if parameter.grad is not None:
            torch.testing.assert_close(
                gradients[key], 2 * parameter.grad, rtol=1e-12, atol=1e-12, msg=key
            )


def looks_at_values(output: Any, target: Any) -> Tensor:
    return output["logits"].sum() if output["value"].sum() > 0 else output["logits"].mean()


def draws(output: Any, target: Any) -> Tensor:
    return F.dropout(output["logits"], 0.5).sum()


@pytest.mark.parametrize("loss", [looks_at_values, draws])
def test_a_loss_that_differs_from_pass_to_pass_cannot_be_part_of_them(loss: Any) -> None:
    with pytest.raises(CannotDivide):
        traced(TwoHeads(), torch.randn(6, 5), loss, CLASSES)


def test_a_sum_in_half_precision_is_no_part_of_them() -> None:
    """The sum that a mean becomes may be too large."""
    with pytest.raises(CannotDivide, match="half precision"):
        traced(TwoHeads(), torch.randn(6, 5), lambda o, t: o["logits"].half().mean(), CLASSES)


def test_a_target_with_more_than_tensors_may_differ_in_that() -> None:
    assert Target.of({"classes": CLASSES, "name": "first"}) is None
    assert Target.of(None) is None


def divided(passes: Joint, devices: int) -> Assignment:
    """The output layer by classes; what comes is whole, and so is the gradient of what leaves."""
    graph = describe(sum_means(passes))
    ends = [f"{e.role} {e.name}" for e in graph.inputs if e.role in ("input", "tangent")]
    requests = Requests({"head.weight": (Shard(0),)}, {name: (Replicate(),) for name in ends})
    linked = LinkedMesh((devices,), (Link(bandwidth=1e9),))
    return propagate(graph, linked, requests)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(16, 256), nn.Linear(256, 4000)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.relu(self.up(x)))
        return logits


def test_logits_are_not_gathered() -> None:
    """The loss is computed of some examples on each device: to bring it there takes less than a
    fourth of what it takes to bring all logits to four devices.
    """
    model, x = Words(), torch.randn(32, 16)
    _, piece = captured(model, x)
    state = dict(piece.module.named_parameters())
    alone = divided(joint(piece.module, state, [x], [False], nullcontext()), 4)
    together = divided(traced(model, x, F.cross_entropy, torch.zeros(32).long())[0], 4)
    logits = 4 * 32 * 4000
    gathered = max(each.bytes for each in redistributions(alone))
    assert gathered == logits * 3 // 4
    assert max(each.bytes for each in redistributions(together)) <= gathered / 4


def test_its_operators_are_of_the_node_that_returns_the_output() -> None:
    model, x = Words(), torch.randn(32, 16)
    whole = capture(model, (x,))
    target = Target.of(torch.zeros(32).long())
    end = LossEnd(F.cross_entropy, whole.outputs, whole.out_spec)
    attributed = attribute(whole, (x,), CPU, nullcontext(), end, target)
    of_loss = [c.name for c in attributed.graph.calls if "nll_loss" in c.operator.family]
    assert [name in attributed.backward for name in of_loss] == [False, True]
    assert {attributed.nodes[name] for name in of_loss} == {whole.returning}
    (returned,) = (o for o in attributed.graph.outputs if o.role == "output")
    assert attributed.graph.types()[returned.value].shape == ()
