"""Which correction of late gradients to recommend, from what was measured of each.

By `scripts/bench/learning`; docs/explanation/late-gradients.md has all of it. A recommendation is
of the nearest case, by the logarithm of how late its gradients are.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from pipedream.graph.choices import ScheduleName
from pipedream.graph.run_config import AsynchronousConfig, RunConfig


class Measured(NamedTuple):
    """Held-out losses above those of the same optimizer whose gradients are not late, as parts of
    them: as they come, and with the `correction` that was best. `late`: by how many updates.
    """

    schedule: ScheduleName
    optimizer: str
    late: int
    correction: str
    as_they_come: float
    corrected: float


MEASURED = (
    Measured("2bw", "AdamW", 1, "error_feedback: true", 0.061, 0.018),
    Measured("2bw", "Muon", 1, "error_feedback: true", 0.020, 0.009),
    Measured("weight-stashing", "AdamW", 7, "nesterov: 0.99", 0.302, 0.059),
)
"""Of weight stashing `basis_rotation` is better still, but takes long where updates have few
tokens."""

_NEAR = 2.0
"""Nothing is said of gradients that are so many times as late as those that were measured."""

_ALIKE = {"Adam": "AdamW"}


def advice(config: RunConfig, schedule: ScheduleName, late: int) -> str | None:
    """Returns a line on what corrects gradients that are so many updates late, if that was measured
    and the config does not have it; None if there is nothing to say.
    """
    name = _ALIKE.get(config.optimizer.name, config.optimizer.name)
    special = config.optimizer.args.get("amsgrad") or any(g.name for g in config.optimizer.groups)
    cases = [each for each in MEASURED if each[:2] == (schedule, name)]
    if not late or not cases or special or config.asynchronous != AsynchronousConfig():
        return None
    near = min(cases, key=lambda each: abs(math.log(each.late / late)))
    if not 1 / _NEAR <= near.late / late <= _NEAR:
        return None
    updates = f"{near.late} update{'s' * (near.late > 1)}"
    return (
        f"asynchronous: {{{near.correction}}} corrects for late gradients: where they were up to "
        f"{updates} late, {near.optimizer} ended {near.as_they_come:.0%} above the loss of timely"
        f" ones, and {near.corrected:.0%} with it (docs/how-to/late-gradients.md)"
    )
