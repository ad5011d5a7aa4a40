"""The names that options, plan.json and run configs share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, TypeAlias, get_args

ScheduleName: TypeAlias = Literal["weight-stashing", "vertical-sync", "2bw", "flush", "gpipe"]
"""Each is explained in `pipedream.schedule.policy`."""

MICROBATCHES = 4
"""Default number of minibatches per update, for schedules that update once for several."""

SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)

DEFAULT_ORDER = "1f1b"
"""The order of passes where a plan names none: see `schedule.ORDERS`."""

OrderName: TypeAlias = Literal[
    "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "auto"
]
"""Each is explained in `pipedream.schedule.orders`."""

ORDER_NAMES: tuple[OrderName, ...] = get_args(OrderName)

WHOLE_ORDERS: tuple[OrderName, ...] = ("1f1b", "interleaved")
"""Those that do not divide backward passes into halves."""

BEST_ORDER = "best"
"""Of pd-optimize: whichever of them is fastest."""

OptimizerName: TypeAlias = Literal["sgd", "momentum", "adam", "muon"]
"""The first three keep no, one or two tensors of state for each parameter; muon keeps one for each
weight of a hidden layer, and has AdamW's two for the others."""

OPTIMIZERS: tuple[OptimizerName, ...] = get_args(OptimizerName)

Correction: TypeAlias = Literal["weight_prediction", "error_feedback", "basis_rotation"]
"""Corrections for late gradients that take memory, as run configs name them."""

CORRECTIONS: tuple[Correction, ...] = get_args(Correction)

_LATE: tuple[ScheduleName, ...] = ("2bw", "weight-stashing", "vertical-sync")

CORRECTED: Mapping[str, tuple[ScheduleName, ...]] = {
    "weight_prediction": ("weight-stashing",),
    "error_feedback": _LATE,
    "basis_rotation": _LATE,
}
"""The schedules that each of `CORRECTIONS` is for."""

_APART = (
    ("weight_prediction", "error_feedback"),
    ("nesterov", "error_feedback"),
    ("nesterov", "basis_rotation"),
    ("weight_prediction", "basis_rotation"),
)


def not_together(wanted: Collection[str]) -> tuple[str, str] | None:
    """Returns two of these corrections of a run config that are not to be had together, if any:
    two that find gradients ahead of the weights, or two forms of an optimizer.
    """
    return next((pair for pair in _APART if set(pair) <= set(wanted)), None)


WHOLE_STATE: tuple[Correction, ...] = ("weight_prediction", "basis_rotation")
"""These know whole parameters: replicas cannot divide the optimizer's state."""

Recompute: TypeAlias = Literal["never", "auto", "whole", "always"]
"""Where memory demands it (auto) single nodes of a stage are recomputed, or the stage (whole)."""

Zero: TypeAlias = Literal["never", "auto", "always"]
"""Whether the replicas of a stage divide the optimizer's state among them (ZeRO-1): auto where a
stage would not fit otherwise."""

InFlight: TypeAlias = Literal["useful", "least"]
"""Minibatches in flight: as many as still raise the throughput, or PipeDream's number."""

Grouping: TypeAlias = Literal["none", "module", "fusion"]
"""Which operators a plan keeps together: see `pipedream.optimizer.cuts.groups`."""

IntraOp: TypeAlias = Literal["auto", "exact", "cones", "propagate", "recursive", "none"]
"""How operators are divided inside stages: see `pipedream.optimizer.intra`."""
