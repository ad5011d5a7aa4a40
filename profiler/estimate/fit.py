"""A device file from measured profiles: what part of the roofline their operators reached.

The seconds of an operator are its part of what its node took in whole passes, so that caches, hand
over and clocks are as in training.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from pipedream.graph.errors import UserError
from pipedream.graph.placements.operators import OperatorProfile, read_operators
from pipedream.graph.profile import Profile, read_profile
from pipedream.profiler.estimate.device_file import DeviceFile, MeasuredError
from pipedream.profiler.estimate.node_times import call_seconds
from pipedream.profiler.estimate.roofline import Roofline
from pipedream.profiler.estimate.updates import traffic
from pipedream.profiler.estimate.work import Work, work_of
from pipedream.profiler.timing.training_overheads import MUON

_CELL = 2
"""Measurements within 1 / so much of an octave in all sizes are one point."""
_WAITING = 5.0
"""A device whose passes take more than so many times their roofline waits for its host."""
_QUICKEST = 0.05
"""The quantile of operators' seconds that none is taken to be below."""
_LEAST = 20e-6
"""Seconds of a node that counts in the median of nodes that all count the same."""


class MeasuredOperator(NamedTuple):
    """An operator that touches memory, with its seconds in a whole pass."""

    work: Work
    seconds: float
    backward: bool


@dataclass(frozen=True)
class MeasuredModel:
    """The profile of a model with its operators, read from a folder of pd-profile."""

    name: str
    profile: Profile
    operators: OperatorProfile

    @cached_property
    def backward(self) -> frozenset[str]:
        """Returns the names of the calls of the backward pass."""
        return self.operators.graph.backward_calls()

    @staticmethod
    def read(folder: Path) -> MeasuredModel:
        """Raises UserError if the folder lacks profile.json or operators.json."""
        profile = read_profile(folder / "profile.json")
        return MeasuredModel(folder.name, profile, read_operators(folder / "operators.json"))

    def worked(self) -> Iterator[MeasuredOperator]:
        """Yields its operators; what views took is counted to the others of their node."""
        passes: dict[tuple[str, bool], list[tuple[Work | None, float]]] = defaultdict(list)
        for call in self.operators.graph.calls:
            key = self.operators.nodes[call.name], call.name in self.backward
            passes[key].append((work_of(call.operator), self.operators.seconds[call.name]))
        for (_, is_backward), calls in passes.items():
            own = sum(seconds for work, seconds in calls if work is not None)
            factor = sum(seconds for _, seconds in calls) / own if own else 0.0
            for work, seconds in calls:
                if work is not None and seconds * factor > 0:
                    yield MeasuredOperator(work, seconds * factor, is_backward)


def fit(blank: DeviceFile, models: Sequence[MeasuredModel]) -> DeviceFile:
    """Returns `blank`, which has the peaks, with launch times, efficiencies and rates of updates as
    in the profiles of `models`. Raises UserError if the device waits for its host in all of them.
    """
    roofline = Roofline(blank)
    waits = {model.name: blank.device != "cpu" and _waits(roofline, model) for model in models}
    busy = [each for model in models if not waits[model.name] for each in model.worked()]
    idle = [each for model in models if waits[model.name] for each in model.worked()]
    if not busy:
        raise UserError(
            f"{blank.name}: in all of these profiles it waits for its host: profile larger"
            " minibatches"
        )
    return blank.model_copy(
        update={
            "launch": _rounded(_quantile([each.seconds for each in busy], _QUICKEST)),
            "host": _host(each for each in idle if not each.backward),
            "host_backward": _host(each for each in idle if each.backward),
            "updates": _updates(blank, models),
            "efficiency": _efficiencies(roofline, busy),
        }
    )


class Errors(NamedTuple):
    """Relative errors of a model: of its `passes`; the median of its nodes', each `node` as it
    weighs in the passes, and `each_node` of _LEAST seconds or more counted the same.
    """

    passes: float
    node: float
    each_node: float


def compare(device: DeviceFile, models: Sequence[MeasuredModel]) -> dict[str, Errors]:
    """Returns the errors by model."""
    roofline = Roofline(device)
    return {model.name: _errors(roofline, model) for model in models}


def with_error(device: DeviceFile, errors: Mapping[str, Errors]) -> DeviceFile:
    """Returns the file with the errors that `compare` found."""
    passes = [abs(each.passes) for each in errors.values()]
    nodes = [each.node for each in errors.values()]
    error = MeasuredError(
        node=_rounded(statistics.median(nodes)),
        model=_rounded(statistics.median(passes)),
        worst=_rounded(max(passes)),
        models=tuple(errors),
    )
    return device.model_copy(update={"error": error})


def _errors(roofline: Roofline, model: MeasuredModel) -> Errors:
    estimated: dict[str, float] = defaultdict(float)
    measured: dict[str, float] = defaultdict(float)
    own = call_seconds(model.operators.graph, model.backward, roofline)
    for call in model.operators.graph.calls:
        node = model.operators.nodes[call.name]
        estimated[node] += own[call.name]
        measured[node] += model.operators.seconds[call.name]
    whole = sum(estimated.values()) / sum(measured.values()) - 1.0
    errors = sorted(
        (abs(estimated[node] / seconds - 1.0), seconds)
        for node, seconds in measured.items()
        if seconds > 0
    )
    alike = [error for error, seconds in errors if seconds >= _LEAST]
    return Errors(whole, _weighted_median(errors), statistics.median(alike) if alike else 0.0)


def _weighted_median(pairs: Sequence[tuple[float, float]]) -> float:
    half, so_far = sum(weight for _, weight in pairs) / 2, 0.0
    for value, weight in pairs:
        so_far += weight
        if so_far >= half:
            return value
    return 0.0


def _efficiencies(
    roofline: Roofline, operators: Sequence[MeasuredOperator]
) -> dict[str, dict[str, tuple[tuple[float, ...], ...]]]:
    cells: dict[tuple[str, str, tuple[float, ...]], list[tuple[float, float]]] = defaultdict(list)
    for each in operators:
        place = tuple(round(size * _CELL) / _CELL for size in each.work.sizes)
        cells[each.work.kind, each.work.dtype, place].append(
            (math.log(roofline.bound(each.work) / each.seconds), each.seconds)
        )
    table: dict[str, dict[str, list[tuple[float, ...]]]] = defaultdict(lambda: defaultdict(list))
    for (kind, dtype, place), logs in sorted(cells.items()):
        weight = sum(seconds for _, seconds in logs)
        mean = sum(log * seconds for log, seconds in logs) / weight
        table[kind][dtype].append((*place, _rounded(math.exp(mean))))
    return {
        kind: {dtype: tuple(points) for dtype, points in by_dtype.items()}
        for kind, by_dtype in table.items()
    }


def _waits(roofline: Roofline, model: MeasuredModel) -> bool:
    """Tells whether the device waits for the host in the passes of a model."""
    operators = list(model.worked())
    measured = sum(each.seconds for each in operators)
    return measured > _WAITING * sum(roofline.bound(each.work) for each in operators)


def _host(operators: Iterable[MeasuredOperator]) -> dict[str, float]:
    """Returns what the host takes to hand over operators of each kind; nothing without any."""
    kinds: dict[str, list[float]] = defaultdict(list)
    for each in operators:
        kinds[each.work.kind].append(each.seconds)
    if not kinds:
        return {}
    every = [seconds for own in kinds.values() for seconds in own]
    medians = {kind: _rounded(statistics.median(own)) for kind, own in sorted(kinds.items())}
    return {"usual": _rounded(statistics.median(every)), **medians}


def _updates(blank: DeviceFile, models: Sequence[MeasuredModel]) -> dict[str, float]:
    parts: dict[str, list[float]] = defaultdict(list)
    for model in models:
        rates = {name: each.bytes_per_second for name, each in model.profile.updates.items()}
        rates.pop(MUON, None)  # which is products as well
        summed = model.profile.gradient_sum_bytes_per_second
        rates |= {"sum": summed} if summed is not None else {}
        for name, rate in rates.items():
            parts[name].append(rate * traffic(name) / blank.bandwidth)
    return {name: _rounded(statistics.median(own)) for name, own in parts.items()}


def _quantile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[int(part * (len(ordered) - 1))]


def _rounded(value: float) -> float:
    """Three digits: a file is to be read."""
    return float(f"{value:.3g}")
