"""A captured model has the gradients that the user wrote, not those of what he computed forward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from pipedream.capture import autograd_functions
from pipedream.capture.captured import Captured
from pipedream.capture.checks.autograd_check import check_backward_passes
from pipedream.capture.export import capture
from pipedream.capture.segment import segment
from pipedream.graph.errors import UserError


class Straight(Function):
    """Rounds, and passes gradients on as if it did not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Reversed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * gradient, None


class Identity(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * gradient


class Several(Function):
    """In the form with setup_context; one output has no gradient, one is no tensor."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, power: int = 2) -> tuple[Tensor, Tensor, None]:
        return (x @ weight.t()) ** power, x > 0, None

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return 3 * gradient @ weight, 5 * gradient.t() @ x, None


class Nested(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return Straight.apply(x) + 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 7 * gradient


class Inherited(Straight):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 5 * gradient


class Prepared(Function):
    """Draws a random mask for its backward pass, in the form with setup_context."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(torch.rand_like(output))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (mask,) = ctx.saved_tensors
        return gradient * mask


straight = Straight.apply  # bound before any capture


class Model(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def several(model: Model, x: Tensor) -> Tensor:
    product, positive, nothing = Several.apply(model.a(x), model.b.weight)
    assert nothing is None
    return product * positive


def read_later(model: Model, x: Tensor) -> Tensor:
    y = model.a(x)
    return model.b(Identity.apply(y)) + y


def made_as_it_runs(model: Model, x: Tensor) -> Tensor:
    class Doubled(Straight):
        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return 2 * gradient

    return Doubled.apply(model.a(x))


def called_directly(model: Model, x: Tensor) -> Tensor:
    """`forward` called as a function like any other has the gradients of what it computes."""
    product, _, _ = Several.forward(model.a(x), model.b.weight)
    return product


USES: dict[str, Callable[[Model, Tensor], Any]] = {
    "straight": lambda model, x: model.b(Straight.apply(model.a(x))),
    "bound": lambda model, x: model.b(straight(model.a(x))),
    "reversed": lambda model, x: model.b(Reversed.apply(model.a(x), 0.5)),
    "several": several,
    "nested": lambda model, x: Nested.apply(model.a(x)),
    "of a parameter": lambda model, x: model.a(x) * Straight.apply(model.b.weight[0]),
    "of the input": lambda model, x: model.a(Straight.apply(x)),
    "beside what it takes": read_later,
    "checkpointed": lambda model, x: checkpoint(
        lambda y: Straight.apply(model.a(y)), x, use_reentrant=False
    ),
    "no function of the user's": lambda model, x: checkpoint(model.a, x, use_reentrant=True),
    "inherited": lambda model, x: model.b(Inherited.apply(model.a(x))),
    "made as it runs": made_as_it_runs,
    "called directly": called_directly,
    "random": lambda model, x: Prepared.apply(model.a(x)) * torch.rand(4),
    "twice, once detached": lambda model, x: Straight.apply(model.a(Straight.apply(x).detach())),
    "in place after": lambda model, x: model.b(Straight.apply(model.a(x)).relu_()),
}


def gradients(output: Tensor, module: nn.Module) -> dict[str, Tensor]:
    module.zero_grad()
    output.square().sum().backward()
    named = dict(module.named_parameters())
    return {name: p.grad.clone() for name, p in named.items() if p.grad is not None}


def run_by_nodes(captured: Captured, x: Tensor) -> Tensor:
    values = {captured.inputs[0]: x}
    for node in captured.graph.order[1:]:
        part = segment(captured, [node], captured.outputs)
        made = part.module(*(values[name] for name in part.inputs))
        values |= dict(zip(part.outputs, made, strict=True))
    return values[captured.outputs[0]]


@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
def test_the_gradients_are_those_of_the_plain_model(use: str) -> None:
    """torch.export follows the forward pass only: straight-through gradients came out as zeros."""
    torch.manual_seed(0)
    model = Model(USES[use])
    captured = capture(model, (torch.randn(2, 4, requires_grad=True),))
    x = torch.randn(2, 4, requires_grad=True)  # reentrant checkpoints want that of an input
    torch.manual_seed(1)
    expected = gradients(model(x), model)
    torch.manual_seed(1)
    found = gradients(run_by_nodes(captured, x), captured.module)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("use", "function"),
    [
        ("straight", "Straight"),
        ("bound", "Straight"),
        ("several", "Several"),
        ("nested", "Nested"),
        ("made as it runs", "Doubled"),
        ("checkpointed", "Straight"),
    ],
)
def test_a_torch_that_calls_functions_in_another_way_is_refused(
    use: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.15 passed by what made them operators, and the backward passes were lost silently."""
    monkeypatch.setattr(autograd_functions, "_attribute", type.__getattribute__)
    with pytest.raises(UserError, match=f"backward pass of autograd function {function} would be"):
        capture(Model(USES[use]), (torch.randn(2, 4),))


def test_a_torch_that_calls_functions_in_another_way_captures_other_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(autograd_functions, "_attribute", type.__getattribute__)
    for use in ("no function of the user's", "called directly"):
        capture(Model(USES[use]), (torch.randn(2, 4, requires_grad=True),))


def test_each_call_of_a_function_must_be_an_operator() -> None:
    module = capture(Model(USES["straight"]), (torch.randn(2, 4),)).module
    check_backward_passes(Counter(Straight=1), module)
    with pytest.raises(UserError, match="function Straight would be lost"):
        check_backward_passes(Counter(Straight=2), module)


def test_a_function_is_a_node_of_its_name_in_every_capture() -> None:
    model = Model(USES["straight"])
    first, second = (capture(model, (torch.randn(batch, 4),)).graph for batch in (2, 3))
    assert [node.description.partition("(")[0] for node in first.nodes.values()] == [
        "Input0",
        "Linear",
        "Straight",
        "Linear",
    ]
    assert first.fingerprint == second.fingerprint


def test_functions_work_as_ever_after_a_capture() -> None:
    capture(Model(USES["straight"]), (torch.randn(2, 4),))
    x = torch.randn(3, requires_grad=True)
    Straight.apply(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1, 1, 1]


class Calls(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return function(x)


class Reads(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, holder: Any) -> Tensor:
        return x * holder["model"].b.weight[0]


class Writes(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)


class Holder(dict[str, nn.Module]):
    """No structure that torch looks into."""


@pytest.mark.parametrize(
    ("use", "told"),
    [
        (lambda model, x: Calls.apply(x, model.a), "Calls is given Linear, whose parameters"),
        (lambda model, x: Calls.apply(x, lambda y: y), "Calls is given function, whose"),
        (
            lambda model, x: Reads.apply(x, Holder(model=model)) + model.a(x),
            "Reads reads a parameter that it is not given: make it an argument of apply",
        ),
        (lambda model, x: Writes.apply(model.a(x)), "Writes writes into its input"),
    ],
)
def test_a_function_that_would_hide_something_is_refused(
    use: Callable[[Model, Tensor], Any], told: str
) -> None:
    with pytest.raises(UserError, match=rf"test_autograd_functions\.py:\d+: Model cannot.*{told}"):
        capture(Model(use), (torch.randn(2, 4),))
