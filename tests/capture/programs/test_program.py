"""The three programs of a stage against autograd, in float64, and what they keep in between."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from pipedream.capture.export import capture
from pipedream.capture.programs.program import traced_program
from pipedream.capture.rewrites.writes import declared
from pipedream.capture.segment import Segment, freeze_constants, segment

OPERATOR = torch.ops.aten.convolution_backward.default
CLOSE = {"rtol": 0.0, "atol": 1e-12}


class Shared(nn.Module):
    """One weight, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(torch.relu(self.layer(x))))


class Pieces(nn.Module):
    """Operators with several outputs, and one output that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.unread = nn.Linear(6, 9), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.wide(x).chunk(3, dim=-1)
        values, _ = torch.topk(b, 2)
        return torch.cat([a * c, values], dim=-1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.three, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (2, 4)).transpose(1, 2)
            for part in self.three(self.norm(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(-2))


class Picked(nn.Module):
    """The gradient of what is picked is written, in place, into zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.places = nn.Linear(6, 6), nn.Buffer(torch.tensor([0, 2, 2]))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.exp())[:, self.places] * x[1:, self.places][:1]


class Biases(nn.Module):
    """Two parameters with the same gradient, which is that of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.ones(5)), nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        return (x.sin() + self.one.expand_as(x)) + self.other.expand_as(x)


def pictures() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 2, 1, groups=1),
    )


CASES = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 4), nn.GELU(), nn.Linear(4, 3)), (5, 6)),
    "shared": (Shared, (5, 6)),
    "several outputs": (Pieces, (5, 6)),
    "attention": (Attention, (2, 5, 8)),
    "picked": (Picked, (4, 6)),
    "same gradient": (Biases, (4, 5)),
    "convolution": (pictures, (4, 2, 8, 8)),
    "dropout": (lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 2)), (5, 6)),
    "recurrent": (lambda: Last(nn.LSTM(6, 4, batch_first=True)), (3, 5, 6)),
    "gates": (lambda: Last(nn.GRU(6, 4, 2, batch_first=True, dropout=0.5)), (3, 5, 6)),
    "cells": (lambda: Cells(nn.GRUCell(6, 6)), (3, 5, 6)),
    "in place": (lambda: Writing(), (4, 5, 6)),
    "laid out otherwise": (lambda: Transposed(nn.BatchNorm1d(5), nn.Linear(6, 2)), (4, 6, 5)),
    "nothing to learn": (lambda: nn.Sequential(nn.ReLU(), nn.Softmax(-1)), (5, 6)),
}


class Last(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)[0]
        return out


class Cells(nn.Module):
    """A loop that writes each step's result into a tensor."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state, results = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
            results[:, step] = state
        return results * x


class Writing(nn.Module):
    """Writes into values, views of them, and a buffer that is read before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mean = nn.Linear(6, 6), nn.Buffer(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        before = y + self.mean
        self.mean.mul_(0.9).add_(y.detach().mean((0, 1)), alpha=0.1)
        z = y * 2
        z.mul_(before)
        z += self.mean
        z[:, 0] = before[:, 1]
        z[1] *= y[0]
        z.masked_fill_(x > 1, 0.5)
        z.view(-1, 6)[2].copy_(y[0, 0])
        z.transpose(0, 1)[3].scatter_(1, torch.tensor([[0, 2]]), before[0, :1, :2])
        z.index_add_(1, torch.tensor([0, 1]), before[:, :2])
        return z + before


class Transposed(nn.Module):
    def __init__(self, norm: nn.Module, layer: nn.Module) -> None:
        super().__init__()
        self.norm, self.layer = norm, layer

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(self.norm(x.transpose(1, 2)))
        return result


def stage(model: nn.Module, given: Tensor) -> tuple[Segment, dict[str, Tensor]]:
    """All of the model as a stage, and its parameters and buffers."""
    captured = capture(model, (given,))
    whole = segment(captured, captured.working, keep=captured.outputs)
    whole = freeze_constants(whole, captured.owner)
    read = {node.target for node in whole.module.graph.find_nodes(op="get_attr")}
    named = [*whole.module.named_parameters(), *whole.module.named_buffers()]
    return whole, {name: tensor for name, tensor in named if name in read}


def by_autograd(
    whole: Segment, state: dict[str, Tensor], given: Tensor, after: Sequence[Tensor]
) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    leaves = {n: t.detach().clone().requires_grad_(t.requires_grad) for n, t in state.items()}
    own = given.detach().requires_grad_()
    (output,) = functional_call(whole.module, leaves, (own,))
    torch.autograd.backward([output], list(after))
    learned = {n: t.grad for n, t in leaves.items() if t.grad is not None}
    state.update({n: t.detach() for n, t in leaves.items() if not t.requires_grad})
    return output.detach(), own.grad, learned


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CASES)
def test_the_passes_give_what_autograd_gives(name: str) -> None:
    make, shape = CASES[name]
    torch.manual_seed(0)
    model, given = make().double(), torch.randn(shape, dtype=torch.float64)
    whole, state = stage(model, given)
    after = [torch.randn_like(whole.module(given)[0])]
    program = traced_program(whole.module, state, [given], [True])
    before = {name: tensor.detach().clone() for name, tensor in state.items()}
    weights = {name: tensor.detach().clone() for name, tensor in before.items()}
    for minibatch in range(2):
        torch.manual_seed(minibatch)
        output, by_input, learned = by_autograd(whole, state, given, after)
        torch.manual_seed(minibatch)
        (own,), saved = program.forward(weights, [given], program.draw())
        (gradient,), kept = program.backward(saved, after)
        found = dict(program.weight_gradients(kept))
        assert not saved
        assert not kept.values
        torch.testing.assert_close(own, output, **CLOSE)
        torch.testing.assert_close(gradient, by_input, **CLOSE)
        assert found.keys() == learned.keys()
        for which, expected in learned.items():
            torch.testing.assert_close(found[which], expected, **CLOSE)
    for which, tensor in state.items():  # the statistics of batch norm too
        torch.testing.assert_close(weights[which], tensor.detach(), **CLOSE)


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["gates", "in place", "picked"])
def test_nothing_is_written_but_buffers(name: str) -> None:
    make, shape = CASES[name]
    given = torch.randn(shape)
    whole, state = stage(make(), given)
    joint = traced_program(whole.module, state, [given], [True]).joint
    buffers = {joint.weights[name] for name, tensor in state.items() if not tensor.requires_grad}
    targets = {each for node in joint.module.graph.nodes for each in declared(node)}
    assert targets <= buffers
    assert bool(targets) == (name == "in place")


def test_a_value_from_before_a_buffer_is_written_is_read_before() -> None:
    """The backward pass alone needs the product of the buffer that the forward pass overwrites."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Buffer(torch.full((4,), 2.0))

        def forward(self, x: Tensor) -> Tensor:
            result = x * self.scale.exp()
            self.scale.add_(1)
            return result

    given = torch.randn(3, 4)
    whole, state = stage(Scaled(), given)
    program = traced_program(whole.module, state, [given], [True])
    for number in (2.0, 3.0):
        _, saved = program.forward(state, [given])
        (gradient,), _ = program.backward(saved, [torch.ones(3, 4)])
        torch.testing.assert_close(gradient, torch.full((3, 4), number).exp())


def test_weights_come_in_the_order_of_a_backward_pass() -> None:
    given = torch.randn(3, 4)
    whole, state = stage(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), given)
    program = traced_program(whole.module, state, [given], [True])
    _, saved = program.forward(state, [given])
    _, kept = program.backward(saved, [torch.ones(3, 4)])
    order = [int(name[0]) for name, _ in program.weight_gradients(kept)]
    assert order == sorted(order, reverse=True)


def test_what_is_kept_is_what_the_gradients_of_the_weights_need() -> None:
    """Of linear layers: what went in and the gradient of what came out. The square needs its input
    for the gradient of its input alone, so this is let go.
    """
    given = torch.randn(3, 4)

    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x

    whole, state = stage(nn.Sequential(nn.Linear(4, 5), Square(), nn.Linear(5, 6)), given)
    program = traced_program(whole.module, state, [given], [True])
    _, saved = program.forward(state, [given])
    _, kept = program.backward(saved, [torch.ones(3, 6)])
    assert sorted(tuple(t.shape) for t in kept.values.values()) == [(3, 4), (3, 5), (3, 5), (3, 6)]


def test_the_backward_pass_of_a_convolution_is_divided() -> None:
    given = torch.randn(2, 2, 6, 6)
    whole, state = stage(nn.Conv2d(2, 3, 3), given)
    parts = traced_program(whole.module, state, [given], [True]).parts
    masks = []
    for part in (parts.inputs, *parts.weights.values()):
        found = part.module.graph.find_nodes(op="call_function", target=OPERATOR)
        masks.append([node.args[-1] for node in found])
    assert masks[0] == [[True, False, False]]
    assert [mask for part in masks[1:] for mask in part] == [[False, True, True]]


def test_an_input_that_wants_no_gradient_costs_nothing() -> None:
    given = torch.randn(3, 4)
    whole, state = stage(nn.Linear(4, 4), given)
    program = traced_program(whole.module, state, [given], [False])
    assert not program.parts.inputs.module.graph.find_nodes(
        op="call_function", target=torch.ops.aten.mm.default
    )
    _, saved = program.forward(state, [given])
    gradients, kept = program.backward(saved, [torch.ones(3, 4)])
    assert gradients == (None,)
    assert {name for name, _ in program.weight_gradients(kept)} == {"weight", "bias"}


def test_an_output_without_a_gradient_gives_none() -> None:
    """As under autograd: neither to the weights that it alone depends on, nor to an input."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other, self.both = (nn.Linear(6, 6) for _ in range(3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.one(self.both(x)), self.other(self.both(x))

    given = torch.randn(3, 6)
    whole, state = stage(Heads(), given)
    program = traced_program(whole.module, state, [given], [True])
    for gradients, learned in (
        ([torch.ones(3, 6), None], {"one", "both"}),
        ([None, torch.ones(3, 6)], {"other", "both"}),
        ([None, None], set()),
    ):
        _, saved = program.forward(state, [given])
        (by_input,), kept = program.backward(saved, gradients)
        assert (by_input is None) == (not learned)
        names = {name.partition(".")[0] for name, _ in program.weight_gradients(kept)}
        assert names == learned


def test_which_gradients_share_their_memory() -> None:
    """Those of two addends are that of the sum; a layer's own is what an operator made, by itself
    or as one of several results.
    """

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(5, 5), nn.LayerNorm(5)
            self.one, self.other = nn.Parameter(torch.ones(4, 5)), nn.Parameter(torch.ones(4, 5))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.norm(x + self.one + self.other))

    given = torch.randn(4, 5)
    whole, state = stage(Sums(), given)
    program = traced_program(whole.module, state, [given], [True])
    assert state.keys() - program.own == {"one", "other"}


def test_a_recurrent_layer_in_single_precision() -> None:
    """oneDNN's operator leaves out what its backward pass needs where gradients are disabled: a run
    of such a stage in halves ended with "Expected a proper Tensor but got None".
    """
    torch.manual_seed(0)
    module, x = Last(nn.LSTM(6, 4, batch_first=True)), torch.randn(3, 5, 6, requires_grad=True)
    segment = capture(module, (x,)).module
    state = {**dict(segment.named_parameters()), **dict(segment.named_buffers())}
    program = traced_program(segment, state, [x], [True])
    outputs, saved = program.forward(state, [x], program.draw())
    assert not outputs[0].requires_grad
    tangent = torch.randn_like(outputs[0])
    (of_input,), kept = program.backward(saved, [tangent])
    found = dict(program.weight_gradients(kept))
    module(x).backward(tangent)
    torch.testing.assert_close(of_input, x.grad)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)
