"""A captured model computes what the model computes: outputs, gradients, statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from pipedream.capture.captured import Captured, flatten_inputs, rebuild
from pipedream.capture.export import capture
from pipedream.capture.segment import freeze_constants, segment
from pipedream.graph.errors import UserError
from pipedream.graph.model import format_graph, parse_graph


def run_by_nodes(captured: Captured, inputs: list[Tensor]) -> dict[str, Tensor]:
    """Runs each graph node as a segment of its own; every value by its name."""
    values = dict(zip(captured.inputs, inputs, strict=True))
    sources = {captured.owner[name] for name in captured.inputs}
    for node in captured.graph.order:
        if node not in sources:
            part = segment(captured, [node], captured.outputs)
            results = part.module(*(values[name] for name in part.inputs))
            values |= dict(zip(part.outputs, results, strict=True))
    return values


def assert_transparent(model: nn.Module, *args: Tensor) -> Captured:
    """Outputs, parameter gradients and buffers equal the plain model's, to the last bit."""
    plain = copy.deepcopy(model).train()
    torch.manual_seed(1)
    expected = flatten_inputs((plain(*args),), {})
    sum(output.square().mean() for output in expected).backward()

    captured = capture(model, args)
    torch.manual_seed(1)
    values = run_by_nodes(captured, list(args))
    outputs = [values[name] for name in captured.outputs]
    for name, tensor in values.items():
        value = captured.values[name]
        assert (value.shape, value.dtype) == (tuple(tensor.shape), tensor.dtype), name
        assert value.requires_grad == tensor.requires_grad, name
    sum(output.square().mean() for output in outputs).backward()
    for output, reference in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, reference, rtol=0, atol=0)
    named = dict(captured.module.named_parameters())
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(named[name].grad, parameter.grad, rtol=0, atol=0)
    buffers = dict(captured.module.named_buffers())
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(buffers.get(name, buffer), buffer, rtol=0, atol=0)
    assert parse_graph(format_graph(captured.graph)).edges == captured.graph.edges
    return captured


def descriptions(captured: Captured) -> list[str]:
    return [node.description for node in captured.graph.nodes.values()]


class Model(nn.Module):
    """Layers by name, and a function of (layers, inputs) as forward."""

    def __init__(self, forward: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        self.function = forward

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self.layers, *inputs)


def test_a_node_is_a_call_of_an_innermost_module_or_an_operator_between_modules() -> None:
    model = Model(
        lambda layers, x: (layers["a"](layers["a"](x)) + x).flatten(1),
        a=nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
    )
    captured = assert_transparent(model, torch.randn(2, 3, 4))
    linear = "Linear(in_features=4, out_features=4, bias=True)"
    assert descriptions(captured) == [
        "Input0",
        linear,
        "ReLU()",
        linear,
        "ReLU()",
        "Add",
        "Flatten",
    ]
    assert set(captured.graph.edges) == {
        ("node1", "node2"),
        ("node2", "node3"),
        ("node3", "node4"),
        ("node4", "node5"),
        ("node5", "node6"),
        ("node1", "node6"),
        ("node6", "node7"),
    }
    bytes_of = [node.parameter_bytes for node in captured.graph.nodes.values()]
    assert bytes_of == [0, 80, 0, 0, 0, 0, 0], "a parameter used twice counts once"


def test_batch_norm_and_dropout_are_captured_as_they_train() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Flatten()
    )
    captured = assert_transparent(model, torch.randn(4, 3, 6, 6))
    assert [text.partition("(")[0] for text in descriptions(captured)] == [
        "Input0",
        "Conv2d",
        "BatchNorm2d",
        "ReLU",
        "Dropout",
        "Flatten",
    ]


def test_a_recurrent_layer_is_one_node_with_several_outputs() -> None:
    def forward(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        y, (h, c) = layers["lstm"](x)
        return y.mean(1) + h[0] * c[0]

    captured = assert_transparent(
        Model(forward, lstm=nn.LSTM(4, 5, batch_first=True)), torch.randn(2, 3, 4)
    )
    node = captured.graph.nodes["node2"]
    assert node.description == "LSTM(4, 5, batch_first=True)"
    assert node.activation_bytes == (2 * 3 * 5 * 4, 2 * 5 * 4, 2 * 5 * 4)


def test_writes_in_place_become_values_where_nobody_else_sees_the_memory() -> None:
    def forward(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        y = layers["a"](x)
        y += 1
        z = y.mul_(2)
        z.add_(2)
        return z + y

    captured = assert_transparent(Model(forward, a=nn.Linear(4, 4)), torch.randn(2, 4))
    assert descriptions(captured)[2:] == ["Add", "Mul", "Add", "Add"]


def test_writes_into_views_become_values() -> None:
    def forward(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        y = layers["a"](x)
        side, seen = y * 3, y.view(-1)
        y[:, 0] = side[:, 1]
        y.t()[1] *= 2
        y.unsqueeze(0)[:, 1].diagonal().fill_(0.5)
        y.masked_fill_(side > 2, 0.0)
        return layers["b"](y) + side + seen.view(2, 4)

    captured = assert_transparent(
        Model(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), torch.randn(2, 4)
    )
    assert "InPlace" not in descriptions(captured)


def test_writes_behind_the_back_of_autograd_stay_in_one_node() -> None:
    """The value changes, its gradient does not: no operator of its own does that."""

    def forward(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        y = layers["a"](x)
        with torch.no_grad():
            y.mul_(2)
        z = layers["b"](y)
        z.detach().clamp_(min=0)
        return z

    captured = assert_transparent(
        Model(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), torch.randn(2, 4)
    )
    assert descriptions(captured).count("InPlace") == 2


@pytest.mark.slow
def test_boolean_masks_of_an_encoder_leave_its_layers_apart() -> None:
    """They become `zeros_like().masked_fill_()`, of which views are read later."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
            self.inner = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            later = torch.ones(5, 5, dtype=torch.bool).triu(1)
            result: Tensor = self.inner(x, later, padding, is_causal=False)
            return result

    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[0, 3:] = True
    captured = assert_transparent(Encoder(), torch.randn(2, 5, 8), padding)
    assert "InPlace" not in descriptions(captured)


class Stateful(nn.Module):
    """Buffers, and what is done with them between two layers."""

    def __init__(self, change: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.change, self.a, self.b = change, nn.Linear(4, 4), nn.Linear(4, 4)
        self.mean, self.queue = nn.Buffer(torch.ones(4)), nn.Buffer(torch.zeros(6, 4))
        self.count, self.at = nn.Buffer(torch.zeros(5)), nn.Buffer(torch.tensor([4]))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        with torch.no_grad():
            self.change(self, y)
        result: Tensor = self.b(y)
        return result


def enqueue(self: Any, y: Tensor) -> None:
    rows = (self.at + torch.arange(len(y))) % 6
    self.queue[rows] = y
    self.at[0] = (self.at[0] + len(y)) % 6


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        lambda self, y: self.count.scatter_add_(0, y.argmax(-1), torch.ones(len(y))),
        lambda self, y: self.count.index_add_(0, y.argmax(-1), torch.ones(len(y))),
        enqueue,
        lambda self, y: self.mean.copy_(0.9 * self.mean + 0.1 * y.mean(0)),
        lambda self, y: self.mean.lerp_(y.mean(0), 0.1),
        lambda self, y: self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1),
        lambda self, y: self.queue.view(3, 2, 4)[1:, 0].add_(y.mean(0)),
        lambda self, y: self.norm(y),
        lambda self, y: torch.inference_mode()(self.mean.add_)(y.mean(0)),
    ],
)
def test_what_is_written_without_gradient_and_never_read_is_written(
    change: Callable[[Any, Tensor], Any],
) -> None:
    model = Stateful(change)
    captured = assert_transparent(model, torch.randn(3, 4))
    whole = segment(captured, captured.working, keep=captured.outputs)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    whole = freeze_constants(whole, captured.owner)
    whole.module(torch.randn(3, 4))
    buffers = dict(whole.module.named_buffers())
    changed = {n for n, old in before.items() if n in buffers and not torch.equal(old, buffers[n])}
    assert changed
    assert changed == set(whole.written_buffers)


def test_a_region_without_gradient_gives_what_it_is_given_with_its_gradient() -> None:
    def forward(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        y = layers["a"](x)
        with torch.no_grad():
            same, view = y, y[0]
            with torch.enable_grad():
                inner = y * 3
        with torch.inference_mode():
            none = y * 2
        return layers["b"](same) + view + inner + none.clone()

    assert_transparent(Model(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), torch.randn(2, 4))


def in_autocast(self: Any, y: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        return self.b(y)


def test_state_that_would_be_lost_is_refused() -> None:
    class Within(nn.Module):
        def __init__(self, change: Callable[[Any, Tensor], Any]) -> None:
            super().__init__()
            self.inner = Stateful(change)
            self.inner.plain = torch.zeros(4)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.inner(x)
            return result

    for change, told in (
        (lambda self, y: setattr(self, "mean", self.mean * 0.9), "buffer mean is replaced"),
        (lambda self, y: self.plain.add_(1), "inner.plain, which is no buffer"),
        (in_autocast, "inside of torch.autocast"),
    ):
        with pytest.raises(UserError, match=told):
            capture(Within(change), (torch.randn(3, 4),))


@pytest.mark.slow
@pytest.mark.parametrize("order", [(1, 3), (3, 1)])
def test_one_example_gives_the_graph_of_several(order: tuple[int, int]) -> None:
    """`contiguous()` of the rest of a row does something only if there are several rows."""

    def forward(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        shifted = x[:, 1:].contiguous()
        wide = layers["a"](shifted).transpose(0, 1).contiguous().transpose(0, 1)
        return layers["b"](wide.contiguous()) + x[:1].expand(len(x), -1).contiguous()[:, 1:]

    model = Model(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    first, second = (
        assert_transparent(copy.deepcopy(model), torch.randn(size, 5)) for size in order
    )
    assert first.graph.fingerprint == second.graph.fingerprint


@pytest.mark.parametrize(("hidden", "exports"), [(False, 1), (True, 2)])
def test_one_example_is_exported_again_only_for_a_hidden_operator(
    monkeypatch: pytest.MonkeyPatch, hidden: bool, exports: int
) -> None:
    """Whether several examples have one more is seen in a run without values, which leaves the
    model and torch's random numbers as they are.
    """
    calls = list[object]()
    export = torch.export.export

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return export(*args, **options)

    def forward(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        layers["norm"].num_batches_tracked.add_(1)
        rows = layers["norm"](layers["drop"](x))
        return (rows[:, 1:] if hidden else rows).contiguous()

    monkeypatch.setattr(torch.export, "export", counted)
    model = Model(forward, norm=nn.BatchNorm1d(5).eval(), drop=nn.Dropout())
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    captured = capture(model, (torch.randn(1, 5, generator=torch.Generator().manual_seed(1)),))
    assert len(calls) == exports
    operators = [str(node.target) for node in captured.module.graph.nodes]
    assert sum("contiguous" in each for each in operators) == hidden
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    torch.testing.assert_close(torch.get_rng_state(), state, rtol=0, atol=0)


def test_a_model_that_cannot_run_without_values_is_exported_for_several_examples() -> None:
    """Here one that refuses the fake tensors of such a run, but none of torch.export."""

    def forward(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting() and isinstance(x, FakeTensor):
            raise ValueError("no values")
        return layers["a"](x)[:, 1:].contiguous()

    model = Model(forward, a=nn.Linear(5, 5))
    one, several = (capture(model, (torch.randn(size, 5),)) for size in (1, 3))
    assert one.graph.fingerprint == several.graph.fingerprint


def test_what_depends_on_nothing_is_made_where_it_is_read_and_is_no_node() -> None:
    def forward(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        mask = torch.arange(4, dtype=x.dtype) > 1
        return torch.where(mask, layers["b"](torch.where(mask, layers["a"](x), 0.0)), 1.0)

    captured = assert_transparent(
        Model(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), torch.randn(2, 4)
    )
    assert [text.partition("(")[0] for text in descriptions(captured)] == [
        "Input0",
        "Linear",
        "Where",
        "Linear",
        "Where",
    ]


def test_random_numbers_are_no_constants() -> None:
    model = Model(lambda layers, x: layers["a"](x) * torch.rand(4), a=nn.Linear(4, 4))
    captured = assert_transparent(model, torch.randn(2, 4))
    assert "Rand" in descriptions(captured)


def test_a_stretch_without_gradient_stays_without() -> None:
    def forward(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        y = layers["a"](x)
        with torch.no_grad():
            scale = y.abs().mean() + 1
        return layers["b"](y / scale) + y.detach()

    assert_transparent(Model(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), torch.randn(2, 4))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_capture_is_the_same_where_gradients_are_off(context: Callable[[], Any]) -> None:
    """Such as for the evaluation of a model that was planned in training."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = x.abs().amax(1, keepdim=True)
                scale = scale + 1
            return self.layer(x / scale)

    model = Scaled()
    expected = capture(model, (torch.randn(2, 4),))
    with context():
        captured = capture(model, (torch.randn(2, 4),))
    assert captured.graph.fingerprint == expected.graph.fingerprint
    assert captured.values == expected.values


def test_a_value_that_no_gradient_comes_to_wants_none() -> None:
    """A layer in front of `detach` learns nothing, and is not decayed either: none is not zero."""

    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return self.second(torch.tanh(h).detach() * (h > 0))

    captured = capture(Detached(), (torch.randn(3, 4),))
    wanting = [value.name for value in captured.values.values() if value.requires_grad]
    assert wanting == list(captured.outputs)


def test_a_parameter_and_a_buffer_that_are_returned_are_values() -> None:
    """Such as for a penalty in the loss."""

    class Returned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.table = nn.Linear(4, 4), nn.Buffer(torch.arange(3.0))

        def forward(self, x: Tensor) -> Any:
            return self.layer(x), self.layer.weight, self.table, self.layer.weight

    captured = assert_transparent(Returned(), torch.randn(3, 4))
    assert [captured.values[name].requires_grad for name in captured.outputs] == [
        True, True, False, True,
    ]  # fmt: skip


def test_tied_weights_go_by_their_first_name() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 10, bias=False))
    model[2].weight = model[0].weight
    captured = assert_transparent(model, torch.randint(0, 10, (2, 3)))
    assert captured.parameters["node2"] == captured.parameters["node4"] == ("0.weight",)
    assert captured.graph.nodes["node4"].parameter_bytes == 0


def test_several_inputs_and_a_dictionary_of_outputs() -> None:
    model = Model(
        lambda layers, x, y: {"sum": layers["a"](x) + y, "first": layers["a"](x)[0]},
        a=nn.Linear(4, 4),
    )
    captured = assert_transparent(model, torch.randn(2, 4), torch.randn(2, 4))
    assert set(rebuild([torch.zeros(1), torch.ones(1)], captured.out_spec)) == {"sum", "first"}


def test_integer_and_boolean_values_cross_without_gradient() -> None:
    def forward(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        y = layers["a"](x)
        return torch.where(y > 0, y, -y).gather(1, y.argmax(1, keepdim=True))

    captured = assert_transparent(Model(forward, a=nn.Linear(4, 4)), torch.randn(2, 4))
    kinds = {(value.dtype, value.requires_grad) for value in captured.values.values()}
    assert (torch.bool, False) in kinds
    assert (torch.int64, False) in kinds


def test_the_fingerprint_is_of_the_structure_not_of_the_batch() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    small, large = (capture(model, (torch.randn(batch, 4),)).graph for batch in (2, 16))
    assert small.fingerprint == large.fingerprint
    other = capture(nn.Sequential(nn.Linear(4, 5), nn.ReLU()), (torch.randn(2, 4),)).graph
    assert other.fingerprint != small.fingerprint


def test_a_model_that_cannot_be_captured_gives_the_reason_and_the_line() -> None:
    def forward(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        if layers["a"](x).sum() > 0:
            return x
        return -x

    with pytest.raises(UserError, match=r"test_export\.py:\d+: Model cannot be captured"):
        capture(Model(forward, a=nn.Linear(4, 4)), (torch.randn(2, 4),))


def test_what_is_read_before_a_write_in_place_stays_with_it() -> None:
    """It was put after the write, for it depends on the values that the writing node gives."""

    def forward(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        y = layers["a"](x).detach()
        side = y * 3
        y[:, 0] = 1.0
        return layers["b"](y) + side

    assert_transparent(Model(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), torch.randn(2, 4))


def test_gradients_of_embeddings_are_dense() -> None:
    """`Embedding(sparse=True)` stopped the run at its first update with a traceback."""

    def forward(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        return layers["b"](layers["a"](x))

    model = Model(forward, a=nn.Embedding(5, 4, sparse=True), b=nn.Linear(4, 4))
    captured = capture(model, (torch.tensor([[1, 2, 2]]),))
    captured.module(torch.tensor([[1, 2, 2]]))[0].sum().backward()
    gradient = captured.module.get_parameter("layers.a.weight").grad
    assert gradient is not None
    assert not gradient.is_sparse
    assert gradient[2].ne(0).all()


class Compared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.embedding(tokens).sum() * labels.sum()


def test_labels_that_are_the_tokens_are_an_input_of_their_own() -> None:
    """As people train language models: `labels=tokens`. A plan was made for another model."""
    tokens = torch.randint(0, 9, (2, 3))
    one = capture(Compared(), (), {"tokens": tokens, "labels": tokens}).graph
    two = capture(Compared(), (), {"tokens": tokens, "labels": tokens.clone()}).graph
    assert one.fingerprint == two.fingerprint


class CountedNorm(nn.Module):
    """As timm's batch norms: it counts minibatches itself, and has its activation within."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        y: Tensor = self.act(x - x.mean(0))
        return y


class CountedLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), CountedNorm(), nn.Linear(8, 8), CountedNorm())
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        self.calls += 1
        return y


def test_counters_are_part_of_the_layer_beside_them() -> None:
    """As nodes that nothing reads, and that read nothing, 33 of an EfficientNet could be in any
    stage: its graph had 2,060,000,000,000 cuts.
    """
    captured = assert_transparent(CountedLast(), torch.randn(4, 8))
    graph = captured.graph
    assert not [
        name for name in graph.order if not (graph.predecessors[name] or graph.nodes[name].is_input)
    ]
    names = [graph.nodes[name].description.partition("(")[0] for name in graph.order]
    assert names == ["Input0", *("Linear", "Mean", "Sub", "ReLU") * 2]
    assert captured.module.get_buffer("calls") == 1
    assert captured.module.get_buffer("layers.3.count") == 1
