"""The choices that options, plan.json and run configs share, by name."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

ScheduleName: TypeAlias = Literal["weight-stashing", "vertical-sync", "2bw", "flush", "gpipe"]
"""`pipedream.schedule.policy` has what each of them says."""

MICROBATCHES = 4
"""Minibatches of one update, for the schedules that make one for several, where nobody says."""

SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)

DEFAULT_ORDER = "1f1b"
"""The order of passes where a plan names none: see `pipedream.schedule.orders`."""

OptimizerName: TypeAlias = Literal["sgd", "momentum", "adam"]
"""Whose state takes memory: none, one or two tensors for each parameter."""

Recompute: TypeAlias = Literal["never", "auto", "always"]

InFlight: TypeAlias = Literal["useful", "least"]
"""As many minibatches in flight as keep the pace, or PipeDream's number."""
