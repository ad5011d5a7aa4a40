"""The table of what the ranks did, beside what the plan predicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pipedream.graph.plan import Simulated
from pipedream.graph.units import show_seconds
from pipedream.runtime.report.utilisation import Utilisation
from pipedream.schedule.action import BACKWARDS, RECEIVES, SENDS, Kind, Worker, stages_and_replicas

_PIPED_WIDTH = 120

_COLUMNS = {
    "forward": (Kind.FORWARD,),
    "backward": BACKWARDS,
    "update": (Kind.UPDATE,),
    "all-reduce": (Kind.ALL_REDUCE,),
    "sending": SENDS,
    "waiting": RECEIVES,
}


def print_utilisation(
    utilisation: Utilisation,
    workers: Mapping[int, Sequence[Worker]],
    hoped: Mapping[int, float],
    simulated: Simulated | None,
    clock_error: float,
) -> None:
    """Prints a row for each rank, then the bubble: predicted, simulated and measured.

    `workers` are those of each rank, `hoped` how busy it would be (`promised`), if that is known.
    `clock_error`: by how many seconds the clocks of the ranks may differ.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PIPED_WIDTH)
    console.print(_table(utilisation, workers, hoped))
    parts = [f"bubble              {utilisation.bubble:.1%}"]
    if any(hoped.values()):
        parts.append(f"planned {max(0.0, 1 - sum(hoped.values()) / len(hoped)):.1%}")
    if simulated is not None:
        parts.append(f"simulated {simulated.bubble:.1%}")
    console.print(", ".join(parts))
    console.print(f"clocks of the ranks within {show_seconds(clock_error)} of each other")


def _table(
    utilisation: Utilisation, workers: Mapping[int, Sequence[Worker]], hoped: Mapping[int, float]
) -> Table:
    while_full = (
        "while the pipeline was full" if utilisation.steady else "filling and draining included"
    )
    table = Table(
        title=f"What each rank did, {while_full}",
        caption="Busy: forward, backward and update. Planned: its passes as they were profiled, "
        "over the planned time per minibatch.",
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
    )
    for heading in ("rank", "stage", "replica", *_COLUMNS, "rest", "busy", "planned"):
        table.add_column(heading, justify="right", no_wrap=True)
    for rank, own in workers.items():
        spent = [utilisation.share(rank, kinds) for kinds in _COLUMNS.values()]
        rest = max(0.0, 1 - sum(spent))
        table.add_row(
            str(rank),
            *stages_and_replicas(own),
            *(f"{share:.1%}" for share in (*spent, rest)),
            f"{utilisation.busy(rank):.1%}",
            f"{hoped[rank]:.1%}" if hoped.get(rank) else "-",
        )
    return table
