"""How the measured seconds of a node divide among its operators.

Each distinct operator is timed alone, on random inputs that lie in memory one after the other and
in no cache: parameters that stayed there from one repeat to the next would be read sooner than in
training. The times are how operators of one node compare: so those of a node's forward operators
are scaled to its measured forward pass, those of the others to the backward pass.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress

import torch
from torch import Tensor

from pipedream.capture.programs.attribution import Attributed
from pipedream.capture.programs.description import executable, execute
from pipedream.graph.errors import ArtifactModel
from pipedream.graph.model import Graph
from pipedream.graph.placements.operators import Operator, OperatorGraph
from pipedream.profiler.timing.cold_inputs import ColdInputs, touched_by
from pipedream.profiler.timing.contention import ALONE, Contention
from pipedream.profiler.timing.stopping_rule import counting, no_garbage_collection

_REPEATS, _FEWEST, _MOST = 5, 3, 12
"""Those that count; in all. Of a large operator some take many times as long: the heap grows for
it.
"""
_SECONDS = 2.0
"""After so many, shared equally, an operator is not repeated further."""
_OPAQUE = ("workspace", "reserve")
"""How arguments are called whose contents, and true size, only the forward operator knows."""


def operator_seconds(
    attributed: Attributed, graph: Graph, device: torch.device
) -> dict[str, float]:
    """Returns the seconds of each call by name. Those of the forward calls of a node add up to its
    forward pass, those of the backward calls to its backward pass; a pass without any call is left
    out.
    """
    operators = {call.name: call.operator for call in attributed.graph.calls}
    alone = seconds_alone(
        dict.fromkeys(operators.values()), device, touched_bytes(attributed.graph)
    )
    passes: dict[tuple[str, bool], list[str]] = defaultdict(list)
    for name, node in attributed.nodes.items():
        passes[node, name in attributed.backward].append(name)
    seconds = {}
    for (node, backward), calls in passes.items():
        timed = graph.nodes[node]
        measured = timed.backward_seconds if backward else timed.forward_seconds
        total = sum(alone[operators[name]] for name in calls)
        for name in calls:
            share = alone[operators[name]] / total if total else 1 / len(calls)
            seconds[name] = measured * share
    return {name: seconds[name] for name in operators}


def touched_bytes(graph: OperatorGraph) -> int:
    """Returns the bytes of all values of the graph."""
    return sum(math.prod(each.shape) * each.element_bytes for each in graph.types().values())


def seconds_alone(
    operators: Iterable[Operator], device: torch.device, between: int = 0
) -> dict[Operator, float]:
    """Returns the seconds of each operator by itself, `between` as in `time_alone`. One that cannot
    be run so takes as long for each byte of its inputs and outputs as is usual among the others.
    """
    distinct = largest_first(operators)
    timed = time_alone(distinct, device, _SECONDS / max(1, len(distinct)), between)
    known = [seconds / touched_by(each) for each, seconds in timed.items() if seconds is not None]
    usual = statistics.median(known) if known else 1.0
    return {
        each: usual * touched_by(each) if seconds is None else seconds
        for each, seconds in timed.items()
    }


def largest_first(operators: Iterable[Operator]) -> list[Operator]:
    """Sorts them so that the heap need not grow for one after it has been timed."""
    return sorted(operators, key=touched_by, reverse=True)


def time_alone(
    operators: Iterable[Operator],
    device: torch.device,
    enough: float,
    between: int = 0,
    at_once: Contention = ALONE,
    limit: float = math.inf,
) -> dict[Operator, float | None]:
    """Returns the seconds of each operator by itself, in their order; None for one that cannot be
    run so. `enough`: after so many seconds an operator is not repeated further. `between`: bytes
    that a minibatch touches from one execution of an operator to the next. `at_once`: processes
    that do the same operator at the same time. `limit`: after so many seconds no other is begun.
    """
    seconds: dict[Operator, float | None] = {}
    inputs, end, fresh = ColdInputs(device, between), time.monotonic() + limit, True
    with no_garbage_collection():
        for each in operators:
            if time.monotonic() > end:
                break
            at_once.begin(_Task(operator=each, between=between, fresh=fresh).model_dump_json())
            seconds[each], fresh = _time(each, enough, inputs, at_once), False
    at_once.end()
    return seconds


class _Task(ArtifactModel):
    """What `time_alone` has other processes do at once; `fresh`: before any other. These take cold
    inputs as often as it does, so that all clear their caches at the same time.
    """

    operator: Operator
    between: int
    fresh: bool


def tasks_on(device: torch.device) -> Callable[[str], Callable[[], None]]:
    """Returns what makes such a process ready for a task; it does nothing where the operator cannot
    be run by itself.
    """
    cold: ColdInputs | None = None

    def made_ready(task: str) -> Callable[[], None]:
        nonlocal cold
        told = _Task.model_validate_json(task)
        if told.fresh:
            cold = None  # which frees its memory first
        cold = kept = cold or ColdInputs(device, told.between)
        inputs: list[Tensor] = []
        with suppress(Exception):
            inputs = kept.of(told.operator)

        def do() -> None:
            nonlocal inputs
            with suppress(Exception):
                kept.keep(execute(told.operator, inputs))
                inputs = kept.of(told.operator)

        return do

    return made_ready


def _time(operator: Operator, enough: float, cold: ColdInputs, at_once: Contention) -> float | None:
    """Returns the median of the repeats that count, after one that does not; `enough`: after so
    many seconds there are no more than are needed. None if it cannot be run by itself.
    """
    repeats: list[float] = []
    watch = cold.watch
    # Whatever torch raises: some operators need certain values, and memory may be short.
    try:
        inputs = cold.of(operator)
        if _needs_forward(operator):
            return None
        end, found = time.monotonic() + enough, 0
        while len(repeats) <= _MOST and (
            found < _FEWEST or (found < _REPEATS and time.monotonic() < end)
        ):
            at_once.go()
            start = watch.mark()
            cold.keep(execute(operator, inputs))
            repeats.append(watch.seconds(start, watch.mark()))
            found = len(counting(repeats[1:]))
            inputs = cold.of(operator)
    except Exception:
        return None
    return statistics.median(counting(repeats[1:]))


def _needs_forward(operator: Operator) -> bool:
    """Tells whether it reads memory that is only right as the forward operator left it."""
    schema = executable(operator)._schema.arguments
    return any(
        argument.name.startswith(_OPAQUE) and operator.input_at(position) is not None
        for position, argument in enumerate(schema)
    )
