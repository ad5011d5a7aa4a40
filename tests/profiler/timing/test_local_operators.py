"""The local operators that are timed, and which."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import pytest
import torch

from pipedream.graph.placements.operators import (
    Input,
    Operator,
    OperatorCall,
    OperatorGraph,
    StageInput,
    TensorType,
)
from pipedream.profiler.timing import local_operators as local_operators_
from pipedream.profiler.timing import operator_times
from pipedream.profiler.timing.local_operators import time_local_operators
from pipedream.profiler.timing.local_parts import all_parts, meshes
from pipedream.profiler.timing.operator_times import time_alone

CPU = torch.device("cpu")


def tensor(*shape: int) -> TensorType:
    return TensorType(shape=shape, dtype="float32", element_bytes=4)


def product(rows: int, inner: int, columns: int) -> Operator:
    return Operator(
        target="aten.mm.default",
        arguments=(Input(input=0), Input(input=1)),
        inputs=(tensor(rows, inner), tensor(inner, columns)),
        outputs=(tensor(rows, columns),),
    )


def graph(**operators: Operator) -> OperatorGraph:
    """Products one by one, each of its own two inputs."""
    inputs, calls = [], []
    for name, operator in operators.items():
        reads = tuple(f"{name}_{k}" for k in range(2))
        inputs += [
            StageInput(value=value, role="parameter", name=value, type=type_)
            for value, type_ in zip(reads, operator.inputs, strict=True)
        ]
        calls.append(OperatorCall(name=name, operator=operator, reads=reads, results=(name,)))
    return OperatorGraph(inputs=tuple(inputs), calls=tuple(calls))


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (2, [(2,)]),
        (4, [(4,), (2, 2)]),
        (6, [(6,), (2, 3), (3, 2)]),
        (7, [(7,)]),
        (8, [(8,), (2, 4), (4, 2)]),
    ],
)
def test_meshes(devices: int, expected: list[tuple[int, ...]]) -> None:
    assert meshes(devices) == expected


def sizes(operator: Operator) -> tuple[int, ...]:
    return *operator.inputs[0].shape, operator.inputs[1].shape[1]


def test_the_parts_of_a_product() -> None:
    def parts(operator: Operator, *shards: int) -> set[tuple[int, ...]]:
        return {sizes(each.part) for each in all_parts([operator], shards, ())}

    halves = {(4, 9, 5), (8, 5, 5), (8, 9, 3)}
    assert parts(product(8, 9, 5), 2) == halves
    assert parts(product(8, 9, 5), 4) == {
        *halves,  # where an axis of 2 x 2 divides nothing
        *((2, 9, 5), (8, 3, 5), (8, 9, 2)),
        *((4, 5, 5), (4, 9, 3), (8, 5, 3)),
    }
    assert parts(product(4, 2, 1), 4) == {(2, 2, 1), (4, 1, 1), (1, 2, 1), (2, 1, 1)}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[Operator]:
    """Each operator takes a second for each of its rows, and those of one column fail."""
    timed: list[Operator] = []

    def time(operator: Operator, *_rest: object) -> float | None:
        timed.append(operator)
        rows, _, columns = sizes(operator)
        return None if columns == 1 else float(rows)

    monkeypatch.setattr(operator_times, "_time", time)
    return timed


def found(
    graph: OperatorGraph, seconds: Mapping[str, float], *shards: int, asked: bool = True
) -> dict[Operator, float]:
    alone = partial(time_alone, device=CPU)
    timed = time_local_operators(graph, {}, seconds, shards if asked else None, alone, alone)
    assert len({each.operator for each in timed}) == len(timed)
    return {each.operator: each.seconds for each in timed}


def test_whole_and_local_operators_are_timed_as_often_and_alike(clock: list[Operator]) -> None:
    two = graph(one=product(8, 8, 8), again=product(8, 8, 8), half=product(4, 8, 8))
    times = found(two, {"one": 1.0, "again": 1.0, "half": 1.0}, 2)
    assert {sizes(each): own for each, own in times.items()} == {
        (8, 8, 8): 8.0,
        (4, 8, 8): 4.0,
        (8, 4, 8): 8.0,
        (8, 8, 4): 8.0,
        (2, 8, 8): 2.0,
        (4, 4, 8): 4.0,
        (4, 8, 4): 4.0,
    }
    assert len(clock) == len(times) * local_operators_._ROUNDS


def test_wholes_and_parts_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything takes half as long again for a second or two. Once wholes were timed, then parts,
    and where one of both met such a time a mesh of two was said to take 48 ms, or 60.
    """
    clock = 0

    def time(operator: Operator, *_rest: object) -> float:
        nonlocal clock
        clock += 1
        return float(sizes(operator)[0]) * (1.5 if 5 <= clock < 8 else 1.0)

    monkeypatch.setattr(operator_times, "_time", time)
    times = found(graph(one=product(8, 8, 8)), {"one": 1.0}, 2)
    assert {sizes(each): own for each, own in times.items()} == {
        (8, 8, 8): 8.0,
        (4, 8, 8): 4.0,
        (8, 4, 8): 8.0,
        (8, 8, 4): 8.0,
    }


def test_what_takes_next_to_nothing_is_left_out(clock: list[Operator]) -> None:
    two = graph(large=product(8, 8, 8), small=product(2, 2, 2))
    times = found(two, {"large": 0.995, "small": 0.005}, 2)
    assert product(2, 2, 2) not in times
    assert product(2, 2, 2) in found(two, {"large": 0.95, "small": 0.05}, 2)
    assert found(two, {"large": 1.0}) == {}, "nobody asked"
    assert product(2, 2, 2) not in clock[: len(times)]


def test_what_cannot_be_run_alone_is_left_out(clock: list[Operator]) -> None:
    times = found(graph(one=product(8, 2, 2)), {"one": 1.0}, 2)
    assert {sizes(each) for each in times} == {(8, 2, 2), (4, 2, 2), (8, 1, 2)}
    assert any(sizes(each) == (8, 2, 1) for each in clock)


def test_unasked_halves_are_timed_and_what_else_is_likely(clock: list[Operator]) -> None:
    """Of quarters and eighths nothing was known: the plan of ResNet-50 on four devices followed
    from halves, but for 0.3 % of the work.
    """
    two = graph(large=product(64, 64, 16), small=product(16, 8, 8))
    times = found(two, {"large": 0.95, "small": 0.05}, asked=False)
    timed = {sizes(each) for each in times}
    assert {(16, 64, 16), (64, 8, 16), (64, 64, 4), (32, 32, 16), (32, 64, 8)} <= timed
    assert {(8, 64, 16), (32, 16, 16), (64, 16, 8), (4, 8, 8), (8, 2, 8)} <= timed
    halves = [(64, 64, 8), (32, 64, 16), (64, 32, 16)]
    order = [sizes(each) for each in clock]
    assert set(order[:2]) == {(64, 64, 16), (16, 8, 8)}, "whole ones"
    assert set(order[2:5]) == set(halves)
    assert order.index((8, 64, 16)) < order.index((4, 8, 8)), "the heaviest operator first"
    assert order.index((16, 32, 16)) < order.index((16, 64, 16)), "the smallest parts first"


def test_what_is_likely_takes_no_longer_than_its_limit(
    clock: list[Operator], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = graph(one=product(64, 64, 16))
    monkeypatch.setattr(local_operators_, "_LIKELY_SECONDS", -1.0)
    times = found(one, {"one": 1.0}, asked=False)
    assert {sizes(each) for each in times} == {
        (64, 64, 16),
        *((32, 64, 16), (64, 32, 16), (64, 64, 8)),
    }


@pytest.mark.slow
def test_they_run() -> None:
    times = found(graph(one=product(256, 256, 256)), {"one": 1.0}, 2, 4)
    assert len(times) > 6
    assert all(own > 0 for own in times.values())
