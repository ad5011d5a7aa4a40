"""What pd-profile prints: the heaviest nodes and the sums."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from pipedream.graph.units import show_bytes, show_seconds
from pipedream.profiler.profile import Profile, ProfiledNode

_HEAVIEST = 10


def print_report(profile: Profile) -> None:
    """Prints the heaviest nodes by forward plus backward time, then the totals."""
    # Without emoji=False, `transformers:llama: ...` is printed with a llama in it.
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(_table(profile))
    console.print(_summary(profile), soft_wrap=True)


def _table(profile: Profile) -> Table:
    table = Table(
        title=f"{profile.model}: heaviest of {len(profile.nodes)} nodes", title_justify="left"
    )
    table.add_column("node", no_wrap=True)
    table.add_column("layer", overflow="fold")
    for heading in ("forward", "backward", "share", "output"):
        table.add_column(heading, justify="right", no_wrap=True)
    all_seconds = profile.totals.forward_seconds + profile.totals.backward_seconds
    for node in sorted(profile.nodes, key=_seconds, reverse=True)[:_HEAVIEST]:
        table.add_row(
            node.id,
            f"{node.module or '-'}: {node.op}",
            show_seconds(node.forward_seconds.median),
            show_seconds(node.backward_seconds.median),
            f"{_seconds(node) / (all_seconds or 1.0):.1%}",
            show_bytes(sum(tensor.bytes for tensor in node.outputs)),
        )
    return table


def _seconds(node: ProfiledNode) -> float:
    return node.forward_seconds.median + node.backward_seconds.median


def _summary(profile: Profile) -> str:
    totals, machine = profile.totals, profile.machine
    threads = "1 thread" if machine.threads == 1 else f"{machine.threads} threads"
    where = machine.device_name + (f", {threads}" if machine.device == "cpu" else "")
    return (
        f"All nodes: forward {show_seconds(totals.forward_seconds)}, "
        f"backward {show_seconds(totals.backward_seconds)} for a minibatch of "
        f"{profile.batch_size}; parameters {show_bytes(totals.parameter_bytes)}.\n"
        f"Measured on {where}: median of {profile.repeats} after {profile.warmup} to warm up."
    )
