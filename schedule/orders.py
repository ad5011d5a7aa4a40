"""Who goes first on a rank: the orders of passes, by the names that plan.json gives them.

What a pipeline learns is its schedule (`policy`); in which order a rank does the passes of its
workers is another matter. An order is a generator of passes; `write_actions` adds the messages and
updates around them, and `checker` proves that the lists of all ranks fit together. To add one,
write such a generator and enter it in ORDERS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from pipedream.graph.choices import DEFAULT_ORDER
from pipedream.schedule.action import Worker
from pipedream.schedule.generate import Step

if TYPE_CHECKING:
    from pipedream.schedule.schedule import Schedule

Passes: TypeAlias = Iterable[tuple[Worker, Step]]
Order: TypeAlias = "Callable[[Schedule, Sequence[Worker]], Passes]"
"""The passes of a rank that has these workers, in the order in which it does them."""


def one_forward_one_backward(schedule: Schedule, workers: Sequence[Worker]) -> Passes:
    """The order that the list scheduler finds (`generate`), for one worker on each rank."""
    (worker,) = workers
    return ((worker, step) for step in schedule.steps[worker])


ORDERS: dict[str, Order] = {DEFAULT_ORDER: one_forward_one_backward}
