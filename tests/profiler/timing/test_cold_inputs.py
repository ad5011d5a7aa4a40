"""Inputs that no execution has touched since caches were cleared."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from pipedream.capture.programs.description import execute
from pipedream.graph.placements.operators import Input, Operator, TensorType
from pipedream.profiler.device import host_cache_bytes
from pipedream.profiler.timing import operator_times
from pipedream.profiler.timing.cold_inputs import ColdInputs, touched_by
from pipedream.profiler.timing.operator_times import tasks_on, time_alone
from pipedream.profiler.timing.stopwatch import Stopwatch

CPU = torch.device("cpu")
MEGABYTE = 1 << 20


def product(rows: int, columns: int, dtype: str = "float32") -> Operator:
    shapes = (rows, rows), (rows, columns), (rows, columns)
    *inputs, output = (
        TensorType(shape=shape, dtype=dtype, element_bytes=getattr(torch, dtype).itemsize)
        for shape in shapes
    )
    arguments = tuple(Input(input=place) for place in range(2))
    return Operator(
        target="aten.mm.default", arguments=arguments, inputs=tuple(inputs), outputs=(output,)
    )


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Operators as they are executed, and bytes as they are read to clear caches."""
    done = list[object]()

    def cleared(watch: Stopwatch) -> None:
        done.append(watch.between.nbytes)

    def executed(operator: Operator, inputs: object) -> None:
        done.append(operator)

    def cleared_near(watch: Stopwatch) -> None:
        done.append("near")

    monkeypatch.setattr(Stopwatch, "clear", cleared)
    monkeypatch.setattr(Stopwatch, "clear_near", cleared_near)
    monkeypatch.setattr(operator_times, "execute", executed)
    return done


def test_what_is_large_is_executed_once_after_each_clear(done: list[object]) -> None:
    """With what a minibatch touches in between, as far as caches hold that. Parts of operators that
    stayed in a cache looked faster than they are in training.
    """
    small = product(4, 4)
    for touched in (0, 300, 8):
        done.clear()
        time_alone([small], CPU, 1.0, touched)
        read = touched // 8 * 8
        assert done == [read, *[small, read] * (len(done) // 2)]
        assert len(done) > 4
    assert ColdInputs(CPU, 1 << 40).watch.between.nbytes == 2 * host_cache_bytes()


def test_many_that_are_small_share_a_clear(done: list[object]) -> None:
    """A clear before each took six of the seven minutes in which VGG-11 was profiled on a processor
    with 480 MB of cache.
    """
    operators = [product(4, columns) for columns in range(1, 30)]
    time_alone(operators, CPU, 1.0, MEGABYTE)
    assert done[0] == MEGABYTE
    assert done.count(MEGABYTE) == 1
    before = [one for one, other in pairwise(done) if isinstance(other, Operator)]
    assert before == [MEGABYTE, *["near"] * (len(before) - 1)]
    assert len(done) > 4 * len(operators)


@pytest.mark.parametrize("dtypes", [("float32",), ("float32", "bfloat16"), ("float64", "float32")])
def test_no_execution_touches_what_another_has_since_the_clear(
    dtypes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    cold, cleared, found = ColdInputs(CPU, 4 * MEGABYTE), [0], set[int]()
    monkeypatch.setattr(Stopwatch, "clear", lambda self: cleared.append(0))
    executions = 0
    for turn in range(60):
        operator = product(64 + turn % 7 * 8, 33 + turn % 5, dtypes[turn % len(dtypes)])
        clears = len(cleared)
        inputs = cold.of(operator)
        if len(cleared) > clears:
            found.clear()
        (result,) = execute(operator, inputs)
        cold.keep(result)
        cleared[-1] += touched_by(operator)
        lines = [line for each in (*inputs, result) if each is not None for line in lines_of(each)]
        assert found.isdisjoint(lines)
        found.update(lines)
        executions += 1
    assert max(cleared) <= cold.watch.room == MEGABYTE
    assert 2 < len(cleared) < executions / 3


def lines_of(tensor: torch.Tensor) -> range:
    """Returns the cache lines in which it lies."""
    begin = tensor.data_ptr()
    return range(begin // 64, (begin + tensor.nbytes - 1) // 64 + 1)


def test_numbers_that_an_operator_writes_are_its_own() -> None:
    """Halved in place again and again, they would be numbers with which a processor is slow."""
    halved = product(4, 4).model_copy(update={"target": "aten.mul_.Tensor"})
    cold = ColdInputs(CPU, MEGABYTE)
    execute(halved, cold.of(halved))
    cold.taken.clear()
    drawn = cold.drawn[torch.float32][:64].clone()
    for _ in range(3):
        execute(halved, cold.of(halved))
        cold.taken.clear()
    assert torch.equal(cold.drawn[torch.float32][:64], drawn)


def test_processes_clear_their_caches_at_the_same_time(
    done: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that none reads memory for itself while the operator is timed in another."""
    operators = [product(16, columns) for columns in range(1, 120, 7)]
    operators.insert(3, product(4, 4).model_copy(update={"target": "aten.linear_backward.out"}))
    made_ready, do, theirs = tasks_on(CPU), list[object](), list[object]()

    def in_the_other(call: object, *given: object) -> object:
        before, done[:] = list(done), []
        result = call(*given)  # type: ignore[operator]
        theirs.extend(done)
        done[:] = before
        return result

    class Other(operator_times.Contention):
        def begin(self, task: str) -> None:
            do.append(in_the_other(made_ready, task))

        def go(self) -> None:
            in_the_other(do[-1])

    for _ in range(2):
        time_alone(operators, CPU, 0.01, 262_144, Other())
    assert theirs == done
    assert 2 < done.count(262_144) < len(done) / 3


def test_inputs_lie_in_memory_as_they_do_in_training() -> None:
    """A product with a transposed weight was timed as one with a weight that lies there as it is
    counted: among sizes of a VGG's head a third shorter, or 40 % longer.
    """
    taken = product(3, 4)
    weight = taken.inputs[1].model_copy(update={"order": (1, 0)})
    one, two = ColdInputs(CPU, 0).of(taken.model_copy(update={"inputs": (taken.inputs[0], weight)}))
    assert (one.shape, one.stride()) == ((3, 3), (3, 1))
    assert (two.shape, two.stride()) == ((3, 4), (1, 3))
    whole = weight.model_copy(update={"shape": (3, 4, 2), "order": (2, 0, 1), "dtype": "int64"})
    (laid,) = ColdInputs(CPU, 0).of(taken.model_copy(update={"inputs": (whole,)}))
    assert laid.stride() == torch.zeros(2, 3, 4).permute(1, 2, 0).stride()
