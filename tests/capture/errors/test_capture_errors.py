"""What cannot be captured is an error of one line: the user's file and line, why, what to do."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

from pipedream.capture.export import capture
from pipedream.graph.errors import UserError


class Model(nn.Module):
    """A linear layer and what `function` does with it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.count = 0
        self.log: list[Any] = []
        self.last: Tensor | None = None
        self.mean = torch.zeros(4)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


@dataclass
class Result:
    value: Tensor


def data_dependent_if(model: Model, x: Tensor) -> Tensor:
    return x if model.layer(x).sum() > 0 else -x  # here


def item(model: Model, x: Tensor) -> Tensor:
    return model.layer(x) * x.max().item()  # here


def number(model: Model, x: Tensor) -> Tensor:
    return model.layer(x).repeat(int(x.abs().sum()), 1)  # here


def loop(model: Model, x: Tensor) -> Tensor:
    while x.norm() > 1:  # here
        x = x / 2
    return model.layer(x)


def nonzero(model: Model, x: Tensor) -> Tensor:
    return model.layer(x)[torch.nonzero(x > 0)[:, 0]]  # here


def boolean_mask(model: Model, x: Tensor) -> Tensor:
    return model.layer(x)[x > 0].mean()  # here


def random_if(model: Model, x: Tensor) -> Tensor:
    return model.layer(x) if torch.rand(()) < 0.5 else x  # here


def through_numpy(model: Model, x: Tensor) -> Tensor:
    return model.layer(x) + torch.from_numpy(np.tanh(x.numpy()))  # here


def formatted(model: Model, x: Tensor) -> Tensor:
    print(f"{x.mean():.3f}")  # here
    return model.layer(x)


def counted(model: Model, x: Tensor) -> Tensor:
    model.count += 1  # here
    return model.layer(x) / model.count


def appended(model: Model, x: Tensor) -> Tensor:
    model.log.append(x)  # here
    return model.layer(x) * len(model.log)


def remembered(model: Model, x: Tensor) -> Tensor:
    before = x if model.last is None else model.last
    model.last = x.detach()  # here
    return model.layer(x + before)


def remembered_tensor(model: Model, x: Tensor) -> Tensor:
    y: Tensor = model.layer(x) + model.mean
    model.mean = y.mean(0).detach()  # here
    return y


def python_random(model: Model, x: Tensor) -> Tensor:
    keep = random.random() < 0.5  # here
    return model.layer(x) if keep else x


def numpy_random(model: Model, x: Tensor) -> Tensor:
    mask = np.random.rand(4) < 0.5  # here
    return model.layer(x) * torch.from_numpy(mask)


def returned_object(model: Model, x: Tensor) -> Result:
    return Result(model.layer(x))


def nested(model: Model, x: Tensor) -> Tensor:
    return model.layer(torch.nested.nested_tensor([x[0], x[1]]))  # here


def distributed(model: Model, x: Tensor) -> Tensor:
    torch.distributed.all_reduce(x)  # here
    return model.layer(x)


def gradient(model: Model, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    return torch.autograd.grad(model.layer(x).sum(), x, create_graph=True)[0]  # here


def backward(model: Model, x: Tensor) -> Tensor:
    y: Tensor = model.layer(x)
    y.sum().backward()  # here
    return y


def gradient_hook(model: Model, x: Tensor) -> Tensor:
    y: Tensor = model.layer(x)
    y.register_hook(lambda gradient: 2 * gradient)  # here
    return y


def past_autograd(model: Model, x: Tensor) -> Tensor:
    y: Tensor = model.layer(x)
    y.data.mul_(2)  # here
    return y


def written_parameter(model: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.layer.weight.mul_(0.5)  # here
    return model.layer(x)


def late_layer(model: Model, x: Tensor) -> Tensor:
    if not hasattr(model, "late"):
        model.late = nn.Linear(4, 4)
    return model.late(x)


def batched_by_vmap(model: Model, x: Tensor) -> Tensor:
    return torch.vmap(model.layer)(x)  # here


def wrong_shape(model: Model, x: Tensor) -> Tensor:
    return model.layer(x.view(3, 5))  # here


def leaves(model: Model, x: Tensor) -> Tensor:
    raise SystemExit(3)  # here


GALLERY: list[tuple[Callable[..., Any], str]] = [
    (data_dependent_if, "its control flow.*use torch.where"),
    (item, "its control flow, a number or a shape depends on the data"),
    (number, "depends on the data"),
    (loop, "depends on the data"),
    (nonzero, "depends on the data"),
    (boolean_mask, "masks of fixed shape"),
    (random_if, "use torch.where"),
    (through_numpy, "numpy.*use torch's functions"),
    (formatted, "leave the print or log out"),
    (counted, "count changes as it runs.*make it a buffer"),
    (appended, "log changes as it runs"),
    (remembered, "last changes as it runs"),
    (remembered_tensor, "mean changes as it runs.*make it a buffer"),
    (python_random, "Python's random.*draw from torch"),
    (numpy_random, "numpy.random.*draw from torch"),
    (returned_object, "returns a Result, an object.*register_dataclass"),
    (nested, "nested tensors.*pad"),
    (distributed, "calls torch.distributed; leave communication to pd-train"),
    (gradient, "takes gradients in its forward pass.*in the loss"),
    (backward, "takes gradients in its forward pass"),
    (gradient_hook, "hooks a tensor's gradient.*write a torch.autograd.Function"),
    (past_autograd, r"writes to a tensor's \.data"),
    (written_parameter, "writes into a parameter.*make it a buffer"),
    (late_layer, "creates late.bias as it runs; create all parameters in __init__"),
    (batched_by_vmap, "vmap; write the batched operators"),
    (wrong_shape, r"RuntimeError: shape '\[3, 5\]' is invalid"),
    (leaves, "SystemExit: 3"),
]


def lines_of(function: Callable[..., Any]) -> set[int]:
    """The line of `function` that is marked; without a mark those of the model's forward.

    Versions of torch that cannot be asked for more note the line of `forward` alone.
    """
    first = function.__code__.co_firstlineno
    lines = Path(__file__).read_text().splitlines()[first:]
    body = lines[: next(i for i, line in enumerate(lines) if not line)]
    marked = {first + i for i, line in enumerate(body, 1) if line.endswith("# here")}
    forward = Model.forward.__code__.co_firstlineno
    alone = not hasattr(fx.proxy.TracerBase, "_filter_traceback_frames")
    return marked | ({forward, forward + 1} if alone or not marked else set())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "told"), GALLERY, ids=[function.__name__ for function, _ in GALLERY]
)
def test_a_mistake_is_told_in_a_line(function: Callable[..., Any], told: str) -> None:
    with pytest.raises(UserError) as caught:
        capture(Model(function), (torch.randn(2, 4),))
    message = caught.value.message
    assert "\n" not in message
    assert len(message) < 500
    where = re.match(r"(.+?):(\d+): Model cannot be captured: ", message)
    assert where is not None, message
    assert where[1] == __file__
    assert int(where[2]) in lines_of(function), message
    assert re.search(told, message), message


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model[0].register_full_backward_hook(lambda module, before, after: None)
    return model


def hooked_parameter() -> nn.Module:
    model = nn.Linear(4, 4)
    model.weight.register_hook(lambda gradient: 2 * gradient)
    return model


X = torch.zeros(2, 4)


@pytest.mark.parametrize(
    ("make", "inputs", "told"),
    [
        (lambda: torch.jit.trace(nn.Linear(4, 4), X), (X,), "it is a ScriptModule"),
        (
            lambda: nn.Sequential(nn.ReLU(), torch.jit.trace(nn.Linear(4, 4), X)),
            (X,),
            "its module 1 is a ScriptModule",
        ),
        (hooked, (X,), "its module 0 has a hook on its gradients"),
        (hooked_parameter, (X,), "weight has a hook on its gradients"),
        (lambda: nn.LazyLinear(4), (X,), "weight has no shape yet"),
        (lambda: nn.ModuleList([nn.Linear(4, 4)]), (X,), "it has no forward"),
        (lambda: nn.Linear(4, 4), (X.numpy(),), r"input \[0\] is a ndarray: give tensors"),
        (lambda: nn.Linear(4, 4), ({"x": object()},), r"input \[0\]\['x'\] is a object"),
        (lambda: nn.Linear(4, 4), (X, X), "given 2 inputs: too many positional arguments"),
    ],
)
def test_a_model_or_an_input_that_is_none(
    make: Callable[[], nn.Module], inputs: tuple[Any, ...], told: str
) -> None:
    with pytest.raises(UserError, match=told) as caught:
        capture(make(), inputs)
    assert "\n" not in caught.value.message


def kept_for_later(model: Model, x: Tensor) -> Tensor:
    model.count += 1
    model.last = model.layer(x)
    model.log.append(model.last)
    return model.last * 2


def test_what_a_call_leaves_behind_is_no_harm_where_nothing_reads_it() -> None:
    model = Model(kept_for_later)
    captured = capture(model, (X,))
    assert len(captured.graph.nodes) == 3
    assert (model.count, model.last, model.log) == (0, None, [])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        self.image = nn.Conv2d(3, 4, 3)
        self.attention = nn.MultiheadAttention(4, 2)

    def forward(self, kind: str, x: Tensor) -> Any:
        if kind == "attention":
            return self.attention(x, x, x)
        return getattr(self, kind)(x)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])

    def forward(self, kind: str, x: Tensor) -> Any:
        return self.blocks[0](kind, x)


@pytest.mark.parametrize(
    ("kind", "x", "told"),
    [
        (
            "layers",
            torch.zeros(2, 5),
            r"blocks.0.layers.0: Linear\(in_features=4, .*, given \[2, 5",
        ),
        ("words", torch.zeros(2, 5), r"blocks.0.words: Embedding\(10, 4\), given \[2, 5\]"),
        ("image", torch.zeros(2, 1, 8, 8), r"image: Conv2d\(3, 4, .*given \[2, 1, 8, 8\]"),
        ("image", torch.zeros(2, 48), r"image: Conv2d\(3, 4, .*given \[2, 48\]"),
        ("attention", torch.zeros(3, 2, 5), r"attention: MultiheadAttention\(.*given \[3, 2, 5\]"),
    ],
)
def test_a_wrong_shape_names_the_layer(kind: str, x: Tensor, told: str) -> None:
    """`a and b must have same reduction dim` was all that was said."""
    with pytest.raises(UserError, match=f"Blocks cannot be captured: .*; in .*{told}") as caught:
        capture(Blocks(), (kind, x))
    assert len(caught.value.message) < 500
