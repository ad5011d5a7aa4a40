"""How backward passes divide, and what is kept in between: against the program of the whole."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipedream.capture.captured import flatten_inputs
from pipedream.capture.export import capture
from pipedream.capture.fake_tensors import capture_fake
from pipedream.capture.programs.program import traced_program
from pipedream.capture.segment import freeze_constants, segment
from pipedream.capture.sources.load import Loaded, load
from pipedream.profiler.assembly import Settings
from pipedream.profiler.measure import measure
from pipedream.profiler.timing import backward_split
from pipedream.profiler.timing.backward_split import BackwardSplit, Halves, backward_splits
from pipedream.profiler.timing.stopping_rule import StoppingRule
from pipedream.profiler.timing.stopwatch import stopwatch

CPU = torch.device("cpu")
ONCE = StoppingRule(1, 1)


class Last(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)[0]
        return out


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


class Chunks(nn.Module):
    """Two layers keep a view each of what another makes."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.one, self.other = nn.Linear(6, 12), nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.both(x).chunk(2, -1)
        return self.one(one).sin() * self.other(other)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Values that several layers read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.kv = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 16)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        k, v = self.kv(y).chunk(2, -1)
        return x + self.out(F.scaled_dot_product_attention(self.q(y), k, v))


def pictures() -> nn.Module:
    layers = (nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 3))
    return nn.Sequential(*layers)


def splits(model: nn.Module, *inputs: Tensor) -> list[BackwardSplit | None]:
    """Of the nodes in order, inputs included."""
    captured = capture(model, inputs)
    found = backward_splits(captured, inputs, ONCE, CPU)
    return [found.get(name) for name in captured.graph.nodes]


def shares(model: nn.Module, *inputs: Tensor) -> list[float]:
    return [split.input_share for split in splits(model, *inputs)[1:] if split is not None]


def both(share: float) -> bool:
    """Whether some of the pass is in each half."""
    return 0 < share < 1


@pytest.mark.slow
def test_the_first_layer_has_no_gradients_of_inputs_and_others_have_both() -> None:
    first, act, second = shares(
        nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), torch.randn(64, 64)
    )
    assert (first, act) == (0, 1)
    assert both(second)


@pytest.mark.thorough
def test_norms_and_recurrences_do_not_divide() -> None:
    first, norm, _, second = shares(pictures(), torch.randn(2, 2, 8, 8))
    assert (first, norm) == (0, 1)
    assert both(second)
    assert shares(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)), torch.randn(5, 6)) == [0, 1]
    model = nn.Sequential(nn.Linear(6, 6), Last(nn.LSTM(6, 4))).double()
    assert len(found := shares(model, torch.randn(3, 5, 6, dtype=torch.float64))) == 2
    assert 0 < found[1] <= 1


@pytest.mark.slow
def test_an_embedding_has_gradients_of_weights_alone() -> None:
    model = nn.Sequential(nn.Embedding(9, 64), nn.Dropout(0.5), nn.Linear(64, 64))
    words, drop, last = shares(model, torch.randint(0, 9, (3, 50)))
    assert (words, drop) == (0, 1)
    assert both(last)


@pytest.mark.slow
def test_frozen_parameters_have_no_gradients() -> None:
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
    model[1].requires_grad_(False)
    model[2].weight.requires_grad_(False)
    given, first, frozen, biased = splits(model, torch.randn(5, 6))
    assert given == BackwardSplit(1.0, 4 * 5 * 6)
    assert first == BackwardSplit(0.0, 4 * 5 * 6), "the gradient of its output"
    assert frozen == BackwardSplit(1.0, 0)
    assert biased is not None
    assert both(biased.input_share)
    assert biased.kept_bytes == 4 * 5 * 6, "of its gradients that of the bias needs no input"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Linear(6, 4), nn.GELU(), nn.Linear(4, 3)), (5, 6)),
        (pictures(), (2, 2, 8, 8)),
        (nn.Sequential(nn.Linear(8, 8), Attention()), (2, 5, 8)),
        (Chunks(), (4, 6)),
    ],
)
def test_what_nodes_keep_is_what_the_program_of_a_stage_holds(
    model: nn.Module, shape: tuple[int, ...]
) -> None:
    """Of all nodes but the first: `Scale`, whose output the next layer keeps."""
    given = torch.randn(shape)
    captured = capture(nn.Sequential(Scale(), model), (given,))
    found = backward_splits(captured, [given], ONCE, CPU)
    nodes = captured.working[1:]
    part = segment(captured, nodes, keep=captured.outputs)
    part = freeze_constants(part, captured.owner)
    state = {**dict(part.module.named_parameters()), **dict(part.module.named_buffers())}
    program = traced_program(part.module, state, [given], [True])
    outputs, saved = program.forward(state, [given])
    _, kept = program.backward(saved, [torch.randn_like(outputs[0])])
    memory = [tensor.untyped_storage() for tensor in kept.values.values()]
    own = {tensor.untyped_storage().data_ptr() for tensor in state.values()}
    held = {each.data_ptr(): each.nbytes() for each in memory if each.data_ptr() not in own}
    assert given.data_ptr() in held
    assert sum(found[name].kept_bytes for name in nodes) + given.nbytes == sum(held.values())


@pytest.mark.slow
def test_equal_layers_are_cut_once_and_others_are_not() -> None:
    layers = [nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 6)]
    layers[3].weight.requires_grad_(False)
    with patch.object(backward_split, "traced_program", side_effect=traced_program) as made:
        found = shares(nn.Sequential(nn.Linear(6, 6), *layers), torch.randn(5, 6))
    assert found[1] == found[2]
    kinds = [call.args[1].keys() for call in made.call_args_list if call.args[1]]
    assert len(kinds) == 4, "the first, whose input wants no gradient, and three others"


@pytest.mark.slow
def test_weights_and_statistics_are_left_as_they_were() -> None:
    model = pictures()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    splits(model, torch.randn(2, 2, 8, 8))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("grown", [0, 1])
def test_a_repeat_in_which_the_heap_grows_does_not_count(grown: int) -> None:
    """Gradients of 411 MB of weights took a second longer in the first repeat, which was then the
    only one: they seemed to be 96 % of a backward pass of which they are half.
    """
    marks = [(0.0, 1.0, 21.0 if number == grown else 2.0) for number in range(4)]
    with (
        patch.object(Halves, "_run", side_effect=[(0.0, 9.0, 9.0), *marks]),
        patch.object(backward_split, "_SECONDS", 0.0),
    ):
        assert Halves.__new__(Halves).seconds(3, stopwatch(CPU)) == [(1.0, 1.0)] * 2


@pytest.mark.slow
def test_a_node_that_cannot_be_cut_is_left_out() -> None:
    with patch.object(backward_split, "traced_program", side_effect=RuntimeError):
        found = splits(nn.Sequential(nn.Linear(6, 6), nn.ReLU()), torch.randn(5, 6))
    assert [split is None for split in found] == [False, True, False]


@pytest.mark.thorough
def test_without_memory_nodes_keep_the_same() -> None:
    real, bare = (
        load("torchvision:resnet18", {}, 2, ("3x32x32",), meta=meta) for meta in (False, True)
    )
    inputs = flatten_inputs(real.args, real.kwargs)
    expected = backward_splits(capture(real.model, real.args, real.kwargs), inputs, ONCE, CPU)
    captured = capture_fake(bare.model, bare.args, bare.kwargs)
    inputs = flatten_inputs(bare.args, bare.kwargs)
    found = backward_splits(captured, inputs, ONCE, CPU, meta=True)
    assert found.keys() == expected.keys() == captured.graph.nodes.keys()
    assert {n: s.kept_bytes for n, s in found.items()} == {
        n: s.kept_bytes for n, s in expected.items()
    }


@pytest.mark.thorough
def test_a_profile_has_halves_that_add_up() -> None:
    loaded = Loaded(Attention(), (torch.randn(2, 5, 8),))
    profile = measure(loaded, Settings("attention", {}, 2, CPU, StoppingRule(1, 2), 1)).profile
    for node in profile.nodes:
        halves = node.backward_input_seconds, node.backward_weight_seconds
        assert None not in (*halves, node.kept_bytes)
        for quartile in ("lower", "median", "upper"):
            parts = [getattr(half, quartile) for half in halves]
            assert min(parts) >= 0
            assert sum(parts) == pytest.approx(getattr(node.backward_seconds, quartile))
        if not node.parameters:
            assert halves[1] is not None
            assert halves[1].median == 0
