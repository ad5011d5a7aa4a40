"""A picture of a model graph: one box for each node, stages in colour or compute time as shade."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import graphviz

from pipedream.graph.model import Graph, Node
from pipedream.graph.units import show_bytes, show_seconds

# Paul Tol's "light" scheme: told apart by the colour-blind, and black text reads well on all.
# Ordered so that neighbours differ most; the tenth stage begins anew.
STAGE_COLOURS = (
    "#77AADD",
    "#EEDD88",
    "#44BB99",
    "#FFAABB",
    "#99DDFF",
    "#EE8866",
    "#BBCC33",
    "#DDDDDD",
    "#AAAA00",
)

# dot's work grows with the length of the edges, counted in ranks that they pass, and much faster
# than linearly. Up to PLAIN_LENGTH it draws curves in about a second (NASNet: 1,468 edges of length
# 3,783). Beyond, straight lines and a coarser search take 3 s for DenseNet-121 (966 edges of length
# 27,818) instead of 23 s; beyond MOST_EDGES or LONGEST even those take many seconds.
PLAIN_LENGTH = 5_000
LONGEST = 50_000
MOST_EDGES = 3_000
_COARSE = {"splines": "line", "mclimit": "0.1", "nslimit": "0.3", "nslimit1": "0.3"}

_WIDEST_LABEL = 44


def draw(
    graph: Graph, path: Path, title: str = "", shade: Mapping[str, float] | None = None
) -> Path:
    """Draws `graph` as `path`.svg, or `path`.gv where dot is missing or the graph too large for it.

    `path` has no suffix; returns the file written. Nodes with stages are coloured by stage, each
    stage in a frame of its own. Otherwise, or where `shade` gives numbers for nodes, a node is the
    darker the larger its number: `shade`'s, or its compute time. See `why_text` for the caller's
    line on a .gv.
    """
    picture = _digraph(graph, title, shade)
    svg, text = (path.parent / (path.name + suffix) for suffix in (".svg", ".gv"))
    image = _lay_out(picture) if _can_lay_out(graph) else None
    written, stale = (text, svg) if image is None else (svg, text)
    if image is None:
        text.write_text(picture.source, encoding="utf-8")
    else:
        svg.write_bytes(image)
    stale.unlink(missing_ok=True)
    return written


def why_text(graph: Graph, written: Path) -> str | None:
    """One line for the user when `draw` has left the text `written`; None when it is a picture."""
    if written.suffix != ".gv":
        return None
    if shutil.which("dot") is None:
        reason = "the dot program is not installed (it comes with graphviz)"
    elif not _can_lay_out(graph):
        reason = f"{len(graph.edges)} edges over {_length(graph)} ranks can take dot minutes"
    else:
        reason = "the dot program could not lay it out"
    return f"{reason}; to draw it: dot -Tsvg -O {written}"


def _can_lay_out(graph: Graph) -> bool:
    small = len(graph.edges) <= MOST_EDGES and _length(graph) <= LONGEST
    return small and shutil.which("dot") is not None


def _length(graph: Graph) -> int:
    """How many ranks all edges pass together, a node's rank being the longest way to it."""
    rank: dict[str, int] = {}
    for name in graph.order:
        rank[name] = max((rank[source] + 1 for source in graph.predecessors[name]), default=0)
    return sum(rank[target] - rank[source] for source, target in graph.edges)


def _lay_out(picture: graphviz.Digraph) -> bytes | None:
    try:
        return bytes(picture.pipe(format="svg", quiet=True))
    except (graphviz.ExecutableNotFound, graphviz.CalledProcessError):
        return None


def _digraph(graph: Graph, title: str, shade: Mapping[str, float] | None) -> graphviz.Digraph:
    picture = graphviz.Digraph("model")
    coarse = _COARSE if _length(graph) > PLAIN_LENGTH else {}
    picture.attr(rankdir="TB", fontname="Helvetica", nodesep="0.2", **coarse)
    picture.attr("node", shape="box", style="filled", fontname="Helvetica", fontsize="10")
    picture.attr("edge", arrowsize="0.6", color="#555555")
    picture.attr(label=graphviz.escape(title), labelloc="t", fontsize="16")
    # Names of our own: an id may hold a colon, which dot takes for a port.
    names = {node: f"n{index}" for index, node in enumerate(graph.nodes)}
    colours = _colours(graph, shade)
    frames: dict[int, graphviz.Digraph] = {}
    for node in graph.nodes.values():
        home = picture if node.stage is None else frames.setdefault(node.stage, graphviz.Digraph())
        tooltip = graphviz.escape(f"{node.id} {node.description}")
        home.node(names[node.id], _label(node), fillcolor=colours[node.id], tooltip=tooltip)
    for stage, frame in sorted(frames.items()):
        frame.name = f"cluster_{stage}"
        frame.attr(label=_stage_label(graph, stage), color=_stage_colour(stage), penwidth="3")
        picture.subgraph(frame)
    for source, target in graph.edges:
        crossing = graph.nodes[source].stage != graph.nodes[target].stage
        picture.edge(names[source], names[target], **({"penwidth": "2.5"} if crossing else {}))
    return picture


def _colours(graph: Graph, shade: Mapping[str, float] | None) -> dict[str, str]:
    if shade is None and any(node.stage is not None for node in graph.nodes.values()):
        return {name: _stage_colour(node.stage) for name, node in graph.nodes.items()}
    if shade is None:
        shade = {name: _seconds(node) for name, node in graph.nodes.items()}
    heaviest = max(shade.values(), default=0.0) or 1.0
    return {name: _tint(shade.get(name, 0.0) / heaviest) for name in graph.nodes}


def _seconds(node: Node) -> float:
    return 0.0 if node.is_input else node.compute_seconds


def _stage_colour(stage: int | None) -> str:
    return "#FFFFFF" if stage is None else STAGE_COLOURS[stage % len(STAGE_COLOURS)]


def _tint(share: float) -> str:
    """White for 0 to orange for 1: one hue, so that it is lightness that tells."""
    white, orange = (255, 255, 255), (238, 136, 51)
    mixed = (round(w + (o - w) * share) for w, o in zip(white, orange, strict=True))
    return "#" + "".join(f"{channel:02X}" for channel in mixed)


def _label(node: Node) -> str:
    """Three lines at most: id and description, times, sizes; those that are zero are left out."""
    what = node.description
    if len(what) > _WIDEST_LABEL:
        what = what[: _WIDEST_LABEL - 3].rstrip() + "..."
    lines = [f"{node.id}  {what}"]
    if node.compute_seconds:
        forward, backward = show_seconds(node.forward_seconds), show_seconds(node.backward_seconds)
        lines.append(f"forward {forward}, backward {backward}")
    sizes = [("out", node.output_bytes), ("parameters", node.parameter_bytes)]
    lines.append(", ".join(f"{what} {show_bytes(size)}" for what, size in sizes if size))
    text = "\\n".join(graphviz.escape(line) for line in lines if line)
    label: str = graphviz.nohtml(text)  # else a label in angle brackets is read as HTML
    return label


def _stage_label(graph: Graph, stage: int) -> str:
    nodes = [node for node in graph.nodes.values() if node.stage == stage]
    seconds = show_seconds(sum(map(_seconds, nodes)))
    parameters = show_bytes(sum(node.parameter_bytes for node in nodes))
    count = "1 node" if len(nodes) == 1 else f"{len(nodes)} nodes"
    return f"stage {stage}: {count}, {seconds}, parameters {parameters}"
