"""The operators of a model's passes with their seconds, beside its profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pipedream.capture.captured import Captured
from pipedream.capture.programs.attribution import Attributed, attribute
from pipedream.capture.programs.joint import CannotDivide
from pipedream.capture.programs.loss_end import LossEnd, Target
from pipedream.graph.model import Graph
from pipedream.graph.placements.operators import Operator, OperatorProfile
from pipedream.profiler.discovery.known import discover
from pipedream.profiler.discovery.separate import Outcome
from pipedream.profiler.timing.local_operators import time_local_operators
from pipedream.profiler.timing.operator_times import operator_seconds
from pipedream.sharding.rules import RULES

_LONGEST = 200
"""Characters of a reason: torch explains at length."""


def profile_operators(
    captured: Captured,
    inputs: Sequence[Tensor],
    batch_size: int,
    device: torch.device,
    precision: AbstractContextManager[Any],
    graph: Graph,
    loss: LossEnd | None = None,
    target: Target | None = None,
    shards: Sequence[int] | None = None,
) -> OperatorProfile:
    """Traces the passes on inputs such as these (in the order of `captured.inputs`) and divides the
    times of the nodes of `graph` among the operators. `precision`: the context of the forward pass,
    which is entered twice. The passes end in the `loss`, if it can be traced. `shards`: numbers of
    devices for which the operators that one of them would have are timed, too; None for two, of the
    operators that take most.

    Raises CannotDivide, with one line, if the passes cannot be had as one graph.
    """
    # Whatever torch raises: operators are of use to some plans, the rest of the profile to all.
    try:
        attributed = None
        if loss is not None and target is not None:
            with suppress(CannotDivide):
                attributed = attribute(captured, inputs, device, precision, loss, target)
        attributed = attributed or attribute(captured, inputs, device, precision)
        attributed, reasons = _discovered(attributed)
        seconds = operator_seconds(attributed, graph, device)
        local_seconds = time_local_operators(attributed.graph, seconds, shards, device)
    except Exception as error:
        said = str(error).strip()
        if not isinstance(error, CannotDivide):
            said = f"{type(error).__name__}: {said}"
        raise CannotDivide(said.splitlines()[0][:_LONGEST]) from error
    return OperatorProfile(
        fingerprint=captured.graph.fingerprint,
        batch_size=batch_size,
        graph=attributed.graph,
        nodes=dict(attributed.nodes),
        seconds=seconds,
        local_seconds=local_seconds,
        undivided=reasons,
    )


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
