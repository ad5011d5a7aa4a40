"""A picture of a model graph: a box per node, coloured by stage or by share of the time."""

from __future__ import annotations

import html
import shutil
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import graphviz

from pipedream.graph.command import write_whole
from pipedream.graph.model import Graph, Node
from pipedream.graph.shown.tables import end_of
from pipedream.graph.units import show_bytes, show_seconds

# Paul Tol's "light" scheme: colour-blind readers can tell the colours apart, and black text is
# readable on all of them. Ordered so that neighbours differ most; the tenth stage starts over.
STAGE_COLOURS = (
    "#77AADD", "#EEDD88", "#44BB99", "#FFAABB", "#99DDFF",
    "#EE8866", "#BBCC33", "#DDDDDD", "#AAAA00",
)  # fmt: skip

# The colour from each share of the total time on: one hue, light to dark, so that it also reads in
# grey. Each step is about three times the last, since few nodes take much of the time.
HEAT = (
    (0.0, "#FFFFFF"),
    (0.001, "#FFF1DC"),
    (0.003, "#FDDCA9"),
    (0.01, "#FDBB6B"),
    (0.03, "#F08C3C"),
    (0.1, "#CC5500"),
    (0.3, "#7A2B00"),
)
_DARK = 0.1
"""From this share on, the text is white."""

# The time of dot grows faster than linearly with the total length of the edges, counted in ranks.
# Up to PLAIN_LENGTH it draws curves; from LONG on it searches less for the best places, which takes
# 0.4 s, not 0.9, for NASNet (1,468 edges of length 3,783). Above, straight lines and a coarser
# search take 3 s for DenseNet-121 (966 edges of length 27,818) instead of 23 s; above MOST_EDGES or
# LONGEST even they take many seconds.
LONG = 1_000
PLAIN_LENGTH = 5_000
LONGEST = 50_000
MOST_EDGES = 3_000
_QUICK = {"nslimit": "0.3"}
_COARSE = {"splines": "line", "mclimit": "0.1", "nslimit1": "0.3", **_QUICK}

_WIDEST_LABEL = 44

_MOST_BOXES, _FEW_BOXES = 100, 40
"""A graph of more nodes is drawn in few boxes, each a module, where modules are known."""

_NO_NOTES: Mapping[str, str] = MappingProxyType({})

OTHER = {".svg": ".gv", ".gv": ".svg"}
"""The suffix of the file that an earlier picture may have."""


def draw(
    graph: Graph,
    path: Path,
    title: str = "",
    modules: Mapping[str, str] | None = None,
    notes: Mapping[str, str] = _NO_NOTES,
) -> Path:
    """Writes the `picture` as `path`.svg or `path`.gv; returns that file, the other one goes.

    `path` has no suffix. `why_text` explains a .gv to the user.
    """
    suffix, content = picture(graph, title, modules, notes)
    written = path.parent / (path.name + suffix)
    write_whole(written, content)
    (path.parent / (path.name + OTHER[suffix])).unlink(missing_ok=True)
    return written


def picture(
    graph: Graph,
    title: str = "",
    modules: Mapping[str, str] | None = None,
    notes: Mapping[str, str] = _NO_NOTES,
    groups: Sequence[Collection[str]] = (),
) -> tuple[str, bytes]:
    """Draws `graph` as an image, .svg, or as text, .gv, if dot is missing or the graph is too
    large; returns the suffix and the content of the file.

    If nodes have stages, each stage has a frame and a colour. Otherwise nodes are darker the larger
    their share of the compute time (`HEAT`), with a legend below the title. `modules`: the path of
    the module of each node; a large graph is drawn as `condensed` by them. `notes`: by node, its
    last line. `groups` of nodes have a frame each, where each node is drawn.
    """
    drawn = graph
    if modules is not None and len(graph.nodes) > _MOST_BOXES:
        drawn = condensed(graph, modules)
    paths = {} if modules is None else modules
    framed = groups if drawn is graph else ()
    digraph = _digraph(drawn, title, graph, paths, notes, framed)
    image = _lay_out(digraph) if _can_lay_out(drawn) else None
    return (".gv", digraph.source.encode()) if image is None else (".svg", image)


def condensed(graph: Graph, modules: Mapping[str, str], most: int = _FEW_BOXES) -> Graph:
    """Returns the graph with a node for each run of nodes of one module, as deep inside the model
    as leaves at most `most` of them, or else as few as there can be. Stages are never joined.

    Runs are of the topological order, so there are no cycles.
    """
    depths = [path.count(".") + 1 for path in modules.values() if path]
    for depth in range(max(depths, default=1), 0, -1):
        upper = {name: ".".join(path.split(".")[:depth]) for name, path in modules.items()}
        runs = _runs(graph, upper)
        if len(runs) <= most:
            break
    return _joined(graph, runs)


def _runs(graph: Graph, modules: Mapping[str, str]) -> list[tuple[str, list[Node]]]:
    runs: list[tuple[str, list[Node]]] = []
    for name in graph.order:
        node, module = graph.nodes[name], modules.get(name, "")
        if module and runs and (module, node.stage) == (runs[-1][0], runs[-1][1][0].stage):
            runs[-1][1].append(node)
        else:
            runs.append((module, [node]))
    return runs


def _joined(graph: Graph, runs: Sequence[tuple[str, Sequence[Node]]]) -> Graph:
    """Returns a node for each run; its output is what others read of it."""
    home = {node.id: number for number, (_, run) in enumerate(runs) for node in run}
    edges = [(home[source], home[target]) for source, target in graph.edges]
    sent = {source for source, target in graph.edges if home[source] != home[target]}
    nodes = [_node(module, run, sent) for module, run in runs]
    between = dict.fromkeys((nodes[a].id, nodes[b].id) for a, b in edges if a != b)
    return Graph({node.id: node for node in nodes}, tuple(between), graph.size_decimals)


def _node(module: str, run: Sequence[Node], sent: Collection[str]) -> Node:
    """Makes a run one node; one node stays what it is."""
    first, *others = run
    if not others:
        return first
    return Node(
        id=f"{first.id} to {run[-1].id}",
        description=f"{module}, {len(run)} nodes",
        forward_seconds=sum(node.forward_seconds for node in run),
        backward_seconds=sum(node.backward_seconds for node in run),
        activation_bytes=(sum(node.output_bytes for node in run if node.id in sent),),
        parameter_bytes=sum(node.parameter_bytes for node in run),
        stage=first.stage,
    )


def why_text(graph: Graph, written: Path) -> str | None:
    """Returns one line for the user if `draw` wrote text (.gv) instead of a picture, else None."""
    if written.suffix != ".gv":
        return None
    if shutil.which("dot") is None:
        reason = (
            "the dot program is not installed; it comes with graphviz: apt install graphviz, brew"
            " install graphviz or conda install graphviz"
        )
    elif not _can_lay_out(graph):
        reason = f"{len(graph.edges)} edges over {_length(graph)} ranks may take dot minutes"
    else:
        reason = "the dot program could not lay it out"
    return f"{reason}; to draw it: dot -Tsvg -O {written}"


def _can_lay_out(graph: Graph) -> bool:
    small = len(graph.edges) <= MOST_EDGES and _length(graph) <= LONGEST
    return small and shutil.which("dot") is not None


def _length(graph: Graph) -> int:
    """Returns the ranks that all edges span; a node's rank is the longest path to it."""
    rank: dict[str, int] = {}
    for name in graph.order:
        rank[name] = max((rank[source] + 1 for source in graph.predecessors[name]), default=0)
    return sum(rank[target] - rank[source] for source, target in graph.edges)


def _lay_out(picture: graphviz.Digraph) -> bytes | None:
    try:
        return bytes(picture.pipe(format="svg", quiet=True))
    except (graphviz.ExecutableNotFound, graphviz.CalledProcessError):
        return None


def _digraph(
    graph: Graph,
    title: str,
    whole_graph: Graph,
    modules: Mapping[str, str],
    notes: Mapping[str, str],
    groups: Sequence[Collection[str]],
) -> graphviz.Digraph:
    """Makes the drawing. `whole_graph`: of whose nodes the boxes of `graph` are made."""
    picture = graphviz.Digraph("model")
    length = _length(graph)
    search = _COARSE if length > PLAIN_LENGTH else _QUICK if length > LONG else {}
    picture.attr(rankdir="TB", fontname="Helvetica", nodesep="0.2", **search)
    picture.attr("node", shape="box", style="filled", fontname="Helvetica", fontsize="10")
    picture.attr("edge", arrowsize="0.6", color="#555555")
    # dot would read a colon in an id as a port.
    names = {node: f"n{index}" for index, node in enumerate(graph.nodes)}
    shares = _shares(graph)
    picture.attr(label=_title(title, bool(shares)), labelloc="t", fontsize="16")
    frames: dict[int, graphviz.Digraph] = {}
    boxes = _Boxes(groups)
    for node in graph.nodes.values():
        outer = picture if node.stage is None else frames.setdefault(node.stage, graphviz.Digraph())
        home = boxes.home(node.id, outer)
        tooltip = graphviz.escape(f"{node.id} {node.description}")
        share = shares.get(node.id)
        colours = {"fillcolor": _stage_colour(node.stage)} if share is None else _heat(share)
        text = _label(node, share, modules.get(node.id, ""), notes.get(node.id, ""))
        home.node(names[node.id], text, tooltip=tooltip, **colours)
    boxes.close()
    for stage, frame in sorted(frames.items()):
        frame.name = f"cluster_{stage}"
        frame.attr(label=_stage_label(whole_graph, stage), color=_stage_colour(stage), penwidth="3")
        picture.subgraph(frame)
    for source, target in graph.edges:
        crossing = graph.nodes[source].stage != graph.nodes[target].stage
        picture.edge(names[source], names[target], **({"penwidth": "2.5"} if crossing else {}))
    return picture


class _Boxes:
    """The frames of groups of several nodes, each within that of its stage."""

    def __init__(self, groups: Sequence[Collection[str]]) -> None:
        shown = [group for group in groups if len(group) > 1]
        self.group_of = {name: number for number, group in enumerate(shown) for name in group}
        self.made: dict[int, tuple[graphviz.Digraph, graphviz.Digraph]] = {}

    def home(self, node: str, outer: graphviz.Digraph) -> graphviz.Digraph:
        """Returns the frame that the node is drawn in; `outer`: that of its stage."""
        number = self.group_of.get(node)
        if number is None:
            return outer
        if number not in self.made:
            frame = graphviz.Digraph(name=f"cluster_group_{number}")
            frame.attr(label="", style="rounded,dashed", color="#555555", penwidth="1")
            self.made[number] = frame, outer
        return self.made[number][0]

    def close(self) -> None:
        for frame, outer in self.made.values():
            outer.subgraph(frame)


def _shares(graph: Graph) -> dict[str, float]:
    """Returns the share of the time of each node but inputs; empty with stages or no times."""
    seconds = {node.id: _seconds(node) for node in graph.nodes.values() if not node.is_input}
    whole = sum(seconds.values())
    if not whole or any(node.stage is not None for node in graph.nodes.values()):
        return {}
    return {name: part / whole for name, part in seconds.items()}


def _seconds(node: Node) -> float:
    return 0.0 if node.is_input else node.compute_seconds


def _stage_colour(stage: int | None) -> str:
    return "#FFFFFF" if stage is None else STAGE_COLOURS[stage % len(STAGE_COLOURS)]


def _heat(share: float) -> dict[str, str]:
    """Returns the colours of a box or of a cell of the legend for a share of the time."""
    _, colour = HEAT[bisect_right(HEAT, share, key=lambda step: step[0]) - 1]
    return {"fillcolor": colour} | ({"fontcolor": "#FFFFFF"} if share >= _DARK else {})


def _title(title: str, with_legend: bool) -> str:
    if not with_legend:
        escaped: str = graphviz.escape(title)
        return escaped
    ends = [share for share, _ in HEAT[1:]]
    texts = [f"under {ends[0]:.1%}", *(f"from {end:.1%}".replace(".0%", "%") for end in ends)]
    cells = "".join(_cell(text, _heat(share)) for text, (share, _) in zip(texts, HEAT, strict=True))
    rows = f"<TR>{_cell('share of the time:', {})}{cells}</TR>"
    if title:
        rows = f'<TR><TD COLSPAN="{1 + len(HEAT)}">{html.escape(title)}</TD></TR>{rows}'
    return f'<<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="4">{rows}</TABLE>>'


def _cell(text: str, colours: Mapping[str, str]) -> str:
    """Returns a cell in small type, framed if it has a colour."""
    look = f' BORDER="1" BGCOLOR="{colours["fillcolor"]}"' if colours else ""
    ink = colours.get("fontcolor", "#000000")
    return f'<TD{look}><FONT POINT-SIZE="10" COLOR="{ink}">{text}</FONT></TD>'


def _label(node: Node, share: float | None, module: str, note: str) -> str:
    """Returns up to four lines: id and layer, times, sizes, the note; zeros are left out."""
    what = f"{module}: {node.description.partition('(')[0]}" if module else node.description
    if module:
        what = end_of(what, _WIDEST_LABEL)
    if len(what) > _WIDEST_LABEL:
        what = what[: _WIDEST_LABEL - 3].rstrip() + "..."
    lines = [f"{node.id}  {what}"]
    if node.compute_seconds:
        forward, backward = show_seconds(node.forward_seconds), show_seconds(node.backward_seconds)
        part = "" if share is None else f": {share:.1%}"
        lines.append(f"forward {forward}, backward {backward}{part}")
    sizes = [("out", node.output_bytes), ("parameters", node.parameter_bytes)]
    lines.append(", ".join(f"{what} {show_bytes(size)}" for what, size in sizes if size))
    lines.append(note)
    text = "\\n".join(graphviz.escape(line) for line in lines if line)
    label: str = graphviz.nohtml(text)  # otherwise a label in angle brackets is HTML
    return label


def _stage_label(graph: Graph, stage: int) -> str:
    nodes = [node for node in graph.nodes.values() if node.stage == stage]
    seconds = show_seconds(sum(map(_seconds, nodes)))
    parameters = show_bytes(sum(node.parameter_bytes for node in nodes))
    count = "1 node" if len(nodes) == 1 else f"{len(nodes)} nodes"
    return f"stage {stage}: {count}, {seconds}, parameters {parameters}"
