"""Of which graph node an operator of a whole model's passes is: that which has it when the node's
own passes are traced alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import pytest
import torch
from joint_models import MODELS
from torch import Tensor, nn

from pipedream.capture.captured import Captured
from pipedream.capture.export import capture
from pipedream.capture.node_modules import node_modules
from pipedream.capture.programs.attribution import Attributed, GraphNodes, attribute
from pipedream.capture.programs.description import describe
from pipedream.capture.programs.divisible import sum_means
from pipedream.capture.programs.joint import CannotDivide, joint
from pipedream.capture.segment import freeze_constants, segment
from pipedream.graph.placements.operators import Operator

CPU = torch.device("cpu")
LAYOUT = {"aten.view", "aten.clone", "aten._unsafe_view"}
"""Whether a view needs a copy depends on how a gradient that comes from another node lies in
memory."""


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)
        self.layers = nn.LSTM(8, 8, 2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.head(self.layers(self.words(tokens))[0])
        return result


ALL = MODELS | {"lstm": (Recurrent, lambda: (torch.randint(0, 10, (3, 5)),))}


def attributed(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Captured, Attributed]:
    captured = capture(model, inputs)
    return captured, attribute(captured, inputs, CPU, nullcontext())


def alone(captured: Captured) -> dict[str, Counter[str]]:
    """By node the operators of its own passes."""
    traced = {each.name: each.meta.get("val") for each in captured.module.graph.nodes}
    targets = {}
    for node in node_modules(captured, CPU):
        module = node.segment.module
        names = [str(each.target) for each in module.graph.find_nodes(op="get_attr")]
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        inputs = [
            torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
            for value in map(traced.__getitem__, node.segment.inputs)
        ]
        state = {name: tensors[name] for name in names}
        graph = describe(
            sum_means(joint(module, state, inputs, node.gradients, torch.enable_grad()))
        )
        targets[node.name] = counted(call.operator for call in graph.calls)
    return targets


def counted(operators: Iterable[Operator]) -> Counter[str]:
    return Counter(each.target for each in operators if each.family not in LAYOUT)


@pytest.mark.slow
@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", ALL)
def test_operators_are_of_the_node_that_has_them_alone(name: str) -> None:
    make, inputs = ALL[name]
    captured, whole = attributed(make(), inputs())
    assert whole.nodes.keys() == {call.name for call in whole.graph.calls}
    for node, own in alone(captured).items():
        calls = [call for call in whole.graph.calls if whole.nodes[call.name] == node]
        found = counted(call.operator for call in calls)
        assert not own - found, captured.graph.nodes[node].description
        sums = found - own
        assert set(sums) <= {"aten.add.Tensor"}, captured.graph.nodes[node].description
    makers = {value: call.name for call in whole.graph.calls for value in call.results}
    outputs = [makers[each.value] for each in whole.graph.outputs]
    roles = [each.role == "output" for each in whole.graph.outputs]
    assert [call not in whole.backward for call in outputs] == roles


def test_a_perceptron() -> None:
    make, inputs = MODELS["mlp"]
    captured, whole = attributed(make(), inputs())
    of: dict[str, list[str]] = {"": []}
    for call in whole.graph.calls:
        if call.operator.family not in ("aten.t", "aten.view"):
            module = captured.module_paths[whole.nodes[call.name]]
            kind = "backward" if call.name in whole.backward else "forward"
            of.setdefault(f"{module} {kind}", []).append(call.operator.family)
    assert of["up forward"] == of["down forward"] == ["aten.addmm"]
    assert of["up backward"] == ["aten.mm", "aten.sum"]
    assert of["down backward"] == ["aten.mm", "aten.mm", "aten.sum"]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.bend = nn.Linear(4, 4), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x + self.bend(x)


def test_a_sum_of_gradients_is_of_the_node_that_gives_the_last() -> None:
    captured, whole = attributed(Residual(), (torch.randn(2, 4),))
    (sum_,) = [
        call.name
        for call in whole.graph.calls
        if call.operator.family == "aten.add" and call.name in whole.backward
    ]
    assert captured.module_paths[whole.nodes[sum_]] == "bend"


def test_what_comes_after_the_last_label_but_before_new_values_of_buffers() -> None:
    """The gradient of a first weight: with batch norm and dropout a model had no operators.json."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout())
    captured, whole = attributed(model, (torch.randn(4, 6),))
    last = [call.name for call in whole.graph.calls if call.name in whole.backward][-1]
    assert captured.module_paths[whole.nodes[last]] == "0"


@pytest.mark.slow
def test_random_numbers_are_inputs_as_in_a_run() -> None:
    make, inputs = MODELS["transformer, fused"]
    _, whole = attributed(make(), inputs())
    assert [each.role for each in whole.graph.inputs].count("draw") == 4
    assert not [call for call in whole.graph.calls if "bernoulli" in call.operator.target]


def test_means_stay_with_their_node() -> None:
    captured, whole = attributed(Averaging(torch.mean), (torch.randn(2, 4),))
    (mean,) = [name for name in captured.working if captured.module_paths[name] == ""]
    made = {call.operator.target: call.name for call in whole.graph.calls}
    assert whole.nodes[made["aten.sum.default"]] == whole.nodes[made["aten.div.Tensor"]] == mean


class Averaging(nn.Module):
    def __init__(self, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.end = nn.Linear(4, 4, bias=False), end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.layer(x))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return 2 * gradient


def test_code_of_the_users_is_refused() -> None:
    with pytest.raises(CannotDivide, match="code of the user's"):
        attributed(Averaging(Doubled.apply), (torch.randn(2, 4),))


class Rotated(nn.Module):
    """With a buffer of which only a constant is made, in a module of its own, as Llama's angles."""

    def __init__(self) -> None:
        super().__init__()
        self.angles = nn.Module()
        self.angles.register_buffer("inverse", torch.rand(4), persistent=False)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x) * self.angles.inverse.cos()
        return result


def test_buffers_that_only_constants_are_made_of_are_no_obstacle() -> None:
    """No Llama ran on a mesh: what is not read is not in the module whose operators are labelled,
    yet is in the state that it is given.
    """
    captured = capture(Rotated(), (torch.randn(2, 4),))
    whole = segment(captured, captured.working, keep=captured.outputs)
    module = freeze_constants(whole, captured.owner).module
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    assert "angles.inverse" in state
    nodes = GraphNodes.of(captured)
    traced = nodes.joint(module, state, [torch.randn(2, 4)], [False], nullcontext())
    assert describe(traced).calls


@pytest.mark.thorough
def test_the_model_stays_as_it_was() -> None:
    make, inputs = ALL["resnet18"]
    model = make()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributed(model, inputs())
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
