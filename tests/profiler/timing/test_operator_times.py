"""The seconds of operators: timed alone, once each, and scaled to what their node takes."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate, chain, count

import pytest
import torch
from joint_models import MODELS
from torch import nn

from pipedream.capture.export import capture
from pipedream.capture.programs.attribution import Attributed, attribute
from pipedream.graph.model import Graph
from pipedream.graph.placements.operators import Input, Operator, TensorType
from pipedream.profiler.timing import operator_times
from pipedream.profiler.timing.operator_times import operator_seconds, seconds_alone, time_alone
from pipedream.profiler.timing.stopwatch import Stopwatch

CPU = torch.device("cpu")


def passes(model: nn.Module, *inputs: torch.Tensor) -> tuple[Attributed, Graph]:
    """With the graph: a second for each node's number forward, and ten times as much backward."""
    captured = capture(model, inputs)
    seconds = {node: float(node.removeprefix("node")) for node in captured.graph.nodes}
    graph = captured.graph.with_nodes(
        replace(node, forward_seconds=seconds[name], backward_seconds=10 * seconds[name])
        for name, node in captured.graph.nodes.items()
    )
    return attribute(captured, inputs, CPU, nullcontext()), graph


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["mlp", "resnet18", "transformer, fused"])
def test_those_of_a_pass_add_up_to_it(name: str) -> None:
    make, inputs = MODELS[name]
    whole, graph = passes(make(), *inputs())
    seconds = operator_seconds(whole, graph, CPU)
    assert list(seconds) == [call.name for call in whole.graph.calls]
    sums: Counter[tuple[str, bool]] = Counter()
    for call, each in seconds.items():
        sums[whole.nodes[call], call in whole.backward] += each
    for (node, backward), total in sums.items():
        own = graph.nodes[node]
        assert total == pytest.approx(own.backward_seconds if backward else own.forward_seconds)


@pytest.mark.slow
def test_the_larger_product_takes_longer() -> None:
    large = called("aten.mm.default", (256, 256), (256, 256))
    small = called("aten.mm.default", (256, 256), (256, 2))
    seconds = seconds_alone([small, large], CPU)
    assert seconds[large] > 2 * seconds[small]


@pytest.mark.slow
def test_equal_operators_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: Counter[Operator] = Counter()

    def time(operator: Operator, *_rest: object) -> float:
        timed[operator] += 1
        return 1.0

    monkeypatch.setattr(operator_times, "_time", time)
    whole, graph = passes(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), torch.randn(2, 4))
    seconds = operator_seconds(whole, graph, CPU)
    assert set(timed.values()) == {1}
    assert sum(timed.values()) < len(seconds)


def called(target: str, *shapes: tuple[int, ...]) -> Operator:
    types = tuple(TensorType(shape=shape, dtype="float32", element_bytes=4) for shape in shapes)
    arguments = tuple(Input(input=number) for number in range(len(shapes)))
    return Operator(target=target, arguments=arguments, inputs=types, outputs=types[:1])


@pytest.mark.slow
def test_one_that_cannot_be_run_takes_as_long_as_its_bytes_do() -> None:
    runs = called("aten.add.Tensor", (64, 64), (64, 64))
    fails = called("aten.add.Tensor", (64, 64), (128, 63))
    seconds = seconds_alone([runs, fails], CPU)
    size = 4 * (2 * 64 * 64 + 128 * 63)
    assert seconds[fails] == pytest.approx(seconds[runs] * size / (4 * 3 * 64 * 64))
    assert seconds_alone([fails], CPU)[fails] > 0


def test_what_only_the_forward_operator_knows_is_not_made_up() -> None:
    """With another workspace than that of the forward pass, oneDNN reads beyond its end."""
    whole, _ = passes(LSTM(), torch.randn(3, 5, 8))
    backward = [
        call.operator
        for call in whole.graph.calls
        if call.operator.target == "aten.mkldnn_rnn_layer_backward.default"
    ]
    assert backward or not torch.backends.mkldnn.is_available()
    assert all(operator_times._needs_forward(each) for each in backward)


class LSTM(nn.LSTM):
    def __init__(self) -> None:
        super().__init__(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        result: torch.Tensor = super().forward(x)[0]
        return result


def test_what_is_between_is_read() -> None:
    watch = Stopwatch(1 << 20)
    assert watch.between.nbytes == 1 << 20
    with torch.profiler.profile() as profile:
        watch.clear()
    assert "aten::sum" in [event.name for event in profile.events()]


@pytest.mark.parametrize("grown", [(1,), (1, 2), (2, 3, 5)])
def test_repeats_in_which_the_heap_grows_do_not_count(
    grown: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product with a result of 411 MB had one repeat, which took 1.2 s in place of 0.09: its half
    seemed to take a twentieth, and a plan of two devices was expected to take 107 ms, not 155. Then
    it had three, of which two did: of two products that took as long, one seemed to take 96 % of
    both.
    """
    takes = ((12.0 if number in grown else 1.0) for number in count())
    now = accumulate(chain([0.0], chain.from_iterable((each, 1.0) for each in takes)))
    monkeypatch.setattr(Stopwatch, "mark", lambda self: next(now))
    product = called("aten.mm.default", (4, 4), (4, 4))
    assert time_alone([product], CPU, enough=0.0) == {product: 1.0}
