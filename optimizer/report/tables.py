"""How the tables of pd-optimize look, and how they show replicas."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from pipedream.graph.placements.placement import Mesh
from pipedream.graph.plan import DraftPlan

_MOST_COUNTS = 6


def make_table(title: str, caption: str, *columns: str | Column) -> Table:
    """An empty table; columns given by their headings are right-aligned and not wrapped."""
    return Table(
        *(Column(c, justify="right", no_wrap=True) if isinstance(c, str) else c for c in columns),
        title=title,
        caption=caption,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
    )


def table_of(
    title: str,
    caption: str,
    rows: Sequence[Mapping[str, str]],
    bold: Collection[int] = (),
    wrapped: Collection[str] = (),
) -> Table:
    """A table whose `rows` map headings to cells, some in `bold`; a column without heading comes
    last. The columns `wrapped`, and that without heading, are left-aligned and may be wrapped.
    """
    headings = sorted(dict.fromkeys(h for row in rows for h in row), key=lambda h: not h)
    columns = (Column(h) if h in wrapped or not h else h for h in headings)
    table = make_table(title, caption, *columns)
    for number, row in enumerate(rows):
        cells = (row.get(heading, "") for heading in headings)
        table.add_row(*cells, style="bold" if number in bold else None)
    return table


def make_grid() -> Table:
    """An empty table of three columns without headings; the second holds figures."""
    columns = Column(), Column(justify="right"), Column()
    return Table(*columns, box=None, show_header=False, pad_edge=False)


def show_count(number: int, what: str, ending: str = "s") -> str:
    """`1 stage`, `2 stages`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}{ending}"


def show_replicas(replicas: Sequence[int]) -> str:
    """`2 x 3, 1`: two stages of three replicas, then one of one."""
    runs: list[tuple[int, int]] = []
    for count in replicas:
        if runs and runs[-1][1] == count:
            runs[-1] = runs[-1][0] + 1, count
        else:
            runs.append((1, count))
    shown = [f"{times} x {count}" if times > 1 else str(count) for times, count in runs]
    if len(shown) > _MOST_COUNTS:
        return f"{len(replicas)} stages"
    return ", ".join(shown)


def show_meshes(plan: DraftPlan) -> str:
    """`2 x 4`: the mesh of each worker; `4, -` if stages differ, where `-` is one device. Empty if
    none is on a mesh.
    """
    meshes = [show_mesh(stage.mesh) for stage in plan.stages]
    if set(meshes) == {"-"}:
        return ""
    return meshes[0] if len(set(meshes)) == 1 else ", ".join(meshes)


def show_mesh(mesh: Mesh | None) -> str:
    """`2 x 4`; `-` for one device."""
    return "-" if mesh is None else " x ".join(map(str, mesh))
