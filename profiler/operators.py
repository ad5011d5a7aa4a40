"""The operators of a model's passes with their seconds, beside its profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipedream.capture.captured import Captured
from pipedream.capture.programs.attribution import Attributed, attribute
from pipedream.capture.programs.joint import CannotDivide
from pipedream.capture.programs.loss_end import LossEnd, Target
from pipedream.graph.model import Graph
from pipedream.graph.placements.operators import Operator, OperatorProfile, TimedOperator
from pipedream.profiler.discovery.known import discover
from pipedream.profiler.discovery.separate import Outcome
from pipedream.profiler.timing.contention import ALONE, Contention
from pipedream.profiler.timing.local_operators import Shards, time_local_operators
from pipedream.profiler.timing.operator_times import operator_seconds, time_alone, touched_bytes
from pipedream.sharding.rules import RULES

_LONGEST = 200
"""Characters of a reason: torch explains at length."""


@dataclass(frozen=True)
class Traced:
    """The operators of a model's passes; `undivided`: by target, why some cannot be divided."""

    attributed: Attributed
    undivided: Mapping[str, str]

    def profile(
        self,
        batch_size: int,
        fingerprint: str,
        seconds: Mapping[str, float],
        local_seconds: Sequence[TimedOperator],
    ) -> OperatorProfile:
        """Returns what operators.json has."""
        return OperatorProfile(
            fingerprint=fingerprint,
            batch_size=batch_size,
            graph=self.attributed.graph,
            nodes=dict(self.attributed.nodes),
            seconds=dict(seconds),
            local_seconds=tuple(local_seconds),
            undivided=dict(self.undivided),
        )


def trace(
    captured: Captured,
    inputs: Sequence[Tensor],
    device: torch.device,
    precision: AbstractContextManager[Any],
    loss: LossEnd | None = None,
    target: Target | None = None,
) -> Traced:
    """Traces the passes on inputs such as these (in the order of `captured.inputs`). `precision`:
    the context of the forward pass, which is entered twice. The passes end in the `loss`, if it can
    be traced. Raises CannotDivide if the passes cannot be had as one graph.
    """
    attributed = None
    if loss is not None and target is not None:
        with suppress(CannotDivide):
            attributed = attribute(captured, inputs, device, precision, loss, target)
    return Traced(*_discovered(attributed or attribute(captured, inputs, device, precision)))


def profile_operators(
    captured: Captured,
    inputs: Sequence[Tensor],
    batch_size: int,
    device: torch.device,
    precision: AbstractContextManager[Any],
    graph: Graph,
    loss: LossEnd | None = None,
    target: Target | None = None,
    shards: Shards = None,
    others: Contention = ALONE,
) -> OperatorProfile:
    """Traces the passes and divides the times of the nodes of `graph` among the operators. `others`
    do parts of operators at the same time. Other arguments: see `trace`.

    Raises CannotDivide, with one line, if the passes cannot be had as one graph.
    """
    # Whatever torch raises: operators are of use to some plans, the rest of the profile to all.
    try:
        traced = trace(captured, inputs, device, precision, loss, target)
        seconds = operator_seconds(traced.attributed, graph, device)
        alone = partial(time_alone, device=device, between=touched_bytes(traced.attributed.graph))
        ways = alone, partial(alone, at_once=others)
        local_seconds = time_local_operators(
            traced.attributed.graph, traced.attributed.nodes, seconds, shards, *ways
        )
    except Exception as error:
        raise CannotDivide(in_one_line(error)) from error
    return traced.profile(batch_size, captured.graph.fingerprint, seconds, local_seconds)


def in_one_line(error: Exception) -> str:
    """Says why the operators cannot be had."""
    said = str(error).strip()
    if not isinstance(error, CannotDivide):
        said = f"{type(error).__name__}: {said}"
    return said.splitlines()[0][:_LONGEST]


def _discovered(attributed: Attributed) -> tuple[Attributed, dict[str, str]]:
    """Returns the operators that no rule knows with the ways to divide them that running them
    shows; by target, why some have none.
    """
    operators = (call.operator for call in attributed.graph.calls)
    unknown = [each for each in dict.fromkeys(operators) if each.family not in RULES]
    outcomes = discover(unknown) if unknown else {}
    calls = tuple(
        call.model_copy(update={"operator": _with_ways(call.operator, outcomes)})
        for call in attributed.graph.calls
    )
    graph = attributed.graph.model_copy(update={"calls": calls})
    reasons = {each.target: reason for each, (_, reason) in outcomes.items() if reason}
    return replace(attributed, graph=graph), reasons


def _with_ways(operator: Operator, outcomes: Mapping[Operator, Outcome]) -> Operator:
    ways, _ = outcomes.get(operator, ((), ""))
    return operator.model_copy(update={"ways": ways}) if ways else operator
