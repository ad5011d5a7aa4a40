"""What half and twice the machines would give, estimated from rough plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from pipedream.graph.cluster import Cluster
from pipedream.graph.plan import Plan
from pipedream.graph.profile import Profile
from pipedream.graph.units import show_seconds
from pipedream.optimizer.compare.sweep import shaped
from pipedream.optimizer.report.answer import show_days, show_speed
from pipedream.optimizer.report.tables import table_of


@dataclass(frozen=True)
class Scaled:
    """A number of machines and the seconds of a minibatch, None if no plan fits them; `own`: those
    that were asked for.
    """

    cluster: Cluster
    seconds: float | None
    own: bool = False


def half_of(cluster: Cluster) -> Cluster | None:
    """The half of its outermost level; None if that is odd, or devices are of several types."""
    if cluster.devices % 2 or len(cluster.kinds) > 1:
        return None
    return shaped(cluster, cluster.devices // 2)


def twice(cluster: Cluster) -> Cluster | None:
    """Twice the outermost level; None if it has devices of several types."""
    return None if len(cluster.kinds) > 1 else shaped(cluster, 2 * cluster.devices)


def scaled_table(scaled: Sequence[Scaled], plan: Plan, profile: Profile) -> Table:
    """A row for each number of machines; efficiency: of a device, relative to these."""
    own = next(each for each in scaled if each.own)
    return table_of(
        "With half and twice the machines",
        "For the same update. Efficiency: speed per device, relative to the machines asked for."
        " The others are scaled from rough plans.",
        [_cells(each, own, plan, profile) for each in scaled],
        bold=[scaled.index(own)],
    )


def _cells(each: Scaled, own: Scaled, plan: Plan, profile: Profile) -> dict[str, str]:
    shape = " x ".join(map(str, each.cluster.machines))
    cells = {"devices": f"{each.cluster.devices} ({shape})"}
    if each.seconds is None or own.seconds is None:
        return cells | {"per\nupdate": "does not fit"}
    rate = own.seconds / each.seconds
    per_device = rate * own.cluster.devices / each.cluster.devices
    days = show_days(profile, each.seconds)
    return cells | {
        "per\nupdate": show_seconds((plan.predicted.microbatches or 1) * each.seconds),
        "speed": show_speed(profile, each.seconds),
        **({"a trillion\ntokens in": days} if days else {}),
        "as\nfast": f"{rate:.2f}",
        "efficiency": f"{per_device:.0%}",
    }
