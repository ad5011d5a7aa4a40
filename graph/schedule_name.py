"""The schedules by name; `pipedream.runtime.policy` has what each of them says."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

ScheduleName: TypeAlias = Literal["weight-stashing", "vertical-sync", "2bw", "flush", "gpipe"]

MICROBATCHES = 4
"""Minibatches of one update, for the schedules that make one for several, where nobody says."""

SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)
