"""The operators of a model's passes with their seconds, beside its profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from pipedream.capture.export import Captured
from pipedream.capture.programs.attribution import attribute
from pipedream.capture.programs.joint import CannotDivide
from pipedream.graph.sharding.operators import OperatorProfile
from pipedream.profiler.timing.operator_times import operator_seconds
from pipedream.profiler.timing.times import Timing

_LONGEST = 200
"""Characters of a reason: torch explains at length."""


def profile_operators(
    captured: Captured,
    inputs: Sequence[Tensor],
    batch_size: int,
    device: torch.device,
    precision: AbstractContextManager[Any],
    nodes: Mapping[str, Timing],
) -> OperatorProfile:
    """Traces the passes on inputs such as these (in the order of `captured.inputs`) and divides the
    times of the nodes among the operators. `precision`: the context of the forward pass, which is
    entered twice.

    Raises CannotDivide, with one line, if the passes cannot be had as one graph.
    """
    # Whatever torch raises: operators are of use to some plans, the rest of the profile to all.
    try:
        found = attribute(captured, inputs, device, precision)
        seconds = operator_seconds(found, nodes, device)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CannotDivide(lines[0][:_LONGEST]) from error
    return OperatorProfile(
        fingerprint=captured.graph.fingerprint,
        batch_size=batch_size,
        graph=found.graph,
        nodes=dict(found.nodes),
        seconds=seconds,
    )
