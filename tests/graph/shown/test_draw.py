from __future__ import annotations

import itertools
import os
import shutil
import time
from pathlib import Path

import graphviz
import pytest

from pipedream.graph.model import Graph, Node, read_graph
from pipedream.graph.shown import draw as drawing
from pipedream.graph.shown.draw import HEAT, STAGE_COLOURS, condensed, draw, picture, why_text

REFERENCE = Path(__file__).parents[3] / "../shared/reference/profiles"
needs_dot = pytest.mark.skipif(shutil.which("dot") is None, reason="no dot program")


def chain(*descriptions: str, stages: tuple[int, ...] = ()) -> Graph:
    nodes = [
        Node(
            id=f"node{index}",
            description=description,
            forward_seconds=0.001 * index,
            backward_seconds=0.002 * index,
            activation_bytes=(1e6,),
            parameter_bytes=4e3,
            stage=stages[index] if stages else None,
        )
        for index, description in enumerate(descriptions)
    ]
    edges = itertools.pairwise(nodes)
    return Graph({node.id: node for node in nodes}, tuple((a.id, b.id) for a, b in edges))


@pytest.fixture(params=["without dot", pytest.param("with dot", marks=needs_dot)])
def dot(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The two worlds that `draw` must serve; gives the suffix of the file it writes there."""
    if request.param == "without dot":
        monkeypatch.setenv("PATH", "")
    return ".gv" if request.param == "without dot" else ".svg"


def source_of(graph: Graph, path: Path, monkeypatch: pytest.MonkeyPatch, **options: object) -> str:
    monkeypatch.setenv("PATH", "")
    return draw(graph, path / "graph", **options).read_text()  # type: ignore[arg-type]


def test_writes_what_the_machine_can_and_says_so(tmp_path: Path, dot: str) -> None:
    graph = chain("Input0", "Linear(3, 4)")
    written = draw(graph, tmp_path / "graph.of.v2", "two nodes")
    assert written == tmp_path / f"graph.of.v2{dot}"
    text = written.read_text()
    assert "Linear(3, 4)" in text
    assert "two nodes" in text
    line = why_text(graph, written)
    assert line is None if dot == ".svg" else "not installed" in (line or "")


def test_leaves_no_picture_of_an_older_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "graph.svg").write_text("of yesterday")
    source_of(chain("ReLU()"), tmp_path, monkeypatch)
    assert [file.name for file in tmp_path.iterdir()] == ["graph.gv"]


def test_label_tells_id_description_times_and_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = source_of(chain("Input0", "Linear(3, 4)"), tmp_path, monkeypatch)
    lines = r"node1  Linear(3, 4)\nforward 1 ms, backward 2 ms: 100.0%\nout 1 MB, parameters 4 kB"
    assert lines in text


def test_long_descriptions_are_shortened_and_kept_whole_in_the_tooltip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "Conv2d(" + ", ".join(str(number) for number in range(60)) + ")"
    text = source_of(chain("Input0", long), tmp_path, monkeypatch)
    assert long[:40] + "..." in text
    assert f'tooltip="node1 {long}"' in text


def test_stages_have_frames_and_colours_that_cycle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = len(STAGE_COLOURS) + 1
    graph = chain(*["ReLU()"] * count, stages=tuple(range(count)))
    text = source_of(graph, tmp_path, monkeypatch)
    assert len(set(STAGE_COLOURS)) == len(STAGE_COLOURS)
    assert text.count("subgraph cluster_") == count
    assert "stage 2: 1 node, 6 ms, parameters 4 kB" in text
    assert fills(text) == [*STAGE_COLOURS, STAGE_COLOURS[0]]
    assert text.count("penwidth=2.5") == count - 1


def test_groups_have_frames_within_those_of_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of one node has none."""
    monkeypatch.setattr("shutil.which", lambda _: None)
    graph = chain(*["ReLU()"] * 5, stages=(0, 0, 0, 1, 1))
    names = list(graph.nodes)
    suffix, content = picture(graph, groups=[names[:2], names[2:3], names[3:]])
    assert suffix == ".gv"
    lines = [line.strip() for line in content.decode().splitlines()]
    frames = [line.split()[1] for line in lines if line.startswith("subgraph")]
    assert frames == ["cluster_0", "cluster_group_0", "cluster_1", "cluster_group_1"]
    at = {name: lines.index(f"subgraph {name} {{") for name in frames}
    boxes = [
        number for number, line in enumerate(lines) if line.startswith("n") and "label=" in line
    ]
    inside = [sum(at[frame] < box for box in boxes) for frame in frames]
    assert inside[1] - inside[2] == 2, "two nodes in the first group"
    assert inside[3] == 2, "and two in the second"
    assert "dashed" in content.decode()


def fills(text: str) -> list[str]:
    return [line.split("fillcolor=")[1][1:8] for line in text.splitlines() if "fillcolor" in line]


def timed(*seconds: float) -> Graph:
    nodes = [Node(f"node{i}", "ReLU()", forward_seconds=time) for i, time in enumerate(seconds)]
    return Graph({node.id: node for node in nodes}, ())


def test_without_stages_a_node_is_as_dark_as_its_share_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = source_of(timed(0.5, 2.5, 7.0, 15.0, 50.0, 225.0, 700.0), tmp_path, monkeypatch)
    assert fills(text) == [colour for _, colour in HEAT]
    white = [line for line in text.splitlines() if "fillcolor" in line and "fontcolor" in line]
    named = [line.split('label="')[1].split()[0] for line in white]
    assert named == ["node5", "node6"], "on dark ground"


def test_heat_reads_in_black_and_white() -> None:
    greys = [
        sum(weight * int(colour[i : i + 2], 16) for weight, i in ((0.3, 1), (0.59, 3), (0.11, 5)))
        for _, colour in HEAT
    ]
    assert all(darker < lighter - 10 for lighter, darker in itertools.pairwise(greys))


def test_a_legend_tells_what_the_shades_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = source_of(timed(1.0, 2.0), tmp_path, monkeypatch)
    assert "share of the time" in text
    assert "under 0.1%" in text
    assert "from 30%" in text
    assert text.count("BGCOLOR") == len(HEAT)
    for none in (timed(0.0), chain("ReLU()", "ReLU()", stages=(0, 1))):
        assert "share of the time" not in source_of(none, tmp_path, monkeypatch)


def test_the_time_of_an_input_is_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The released resnet18 profile books 474 ms on its input: all else looked white beside it."""
    nodes = {
        "a": Node("a", "Input0", forward_seconds=9.0),
        "b": Node("b", "ReLU()", forward_seconds=0.1),
    }
    text = source_of(Graph(nodes, (("a", "b"),)), tmp_path, monkeypatch)
    assert fills(text) == ["#FFFFFF", HEAT[-1][1]]
    assert text.count("100.0%") == 1
    assert ": 0.0%" not in text


@pytest.mark.parametrize("text", [r"a\n:b", '"quoted"', "<b>", "x -> y; {", "Übung", "back\\"])
def test_any_text_may_stand_in_ids_and_descriptions(tmp_path: Path, text: str, dot: str) -> None:
    graph = Graph({text: Node(text, text), "b": Node("b", "B()")}, ((text, "b"),))
    written = draw(graph, tmp_path / "graph", text)
    assert written.suffix == dot


@pytest.mark.parametrize("limit", ["MOST_EDGES", "LONGEST"])
def test_a_graph_too_large_is_left_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    graph = chain("ReLU()", "ReLU()", "ReLU()")
    graph = Graph(graph.nodes, (*graph.edges, ("node0", "node2")))
    monkeypatch.setattr(drawing, limit, 2)
    monkeypatch.setattr(shutil, "which", lambda program: "/usr/bin/dot")
    written = draw(graph, tmp_path / "graph")
    assert written.name == "graph.gv"
    assert "3 edges over 4 ranks" in (why_text(graph, written) or "")


@needs_dot
def test_long_edges_are_drawn_in_seconds(tmp_path: Path) -> None:
    """DenseNet-121, whose blocks read all layers before: dot took 23 s for its curves."""
    nodes = {f"n{index}": Node(f"n{index}", "Cat") for index in range(85)}
    edges = [
        (f"n{source}", f"n{target}")
        for target in range(85)
        for source in range(target)
        if source == target - 1 or source % 6 == 0
    ]
    started = time.process_time() + os.times().children_user
    assert draw(Graph(nodes, tuple(edges)), tmp_path / "graph").suffix == ".svg"
    assert time.process_time() + os.times().children_user - started < 20


def test_a_dot_that_fails_leaves_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> bytes:
        raise graphviz.CalledProcessError(1, ["dot"], b"", b"out of memory")

    monkeypatch.setattr(shutil, "which", lambda program: "/usr/bin/dot")
    monkeypatch.setattr(graphviz.Digraph, "pipe", fail)
    graph = chain("ReLU()")
    written = draw(graph, tmp_path / "graph")
    assert written.name == "graph.gv"
    assert "could not" in (why_text(graph, written) or "")


@pytest.mark.skipif(not REFERENCE.exists(), reason="no reference profiles")
def test_the_largest_published_profile_is_drawn(tmp_path: Path, dot: str) -> None:
    graph = read_graph(REFERENCE / "nasnetalarge/graph.txt")
    assert draw(graph, tmp_path / "graph").suffix == dot


def blocks(count: int, stages: int = 1) -> tuple[Graph, dict[str, str]]:
    """So many residual blocks of four layers, and the module of each layer."""
    nodes, edges, modules = {}, [], {}
    for block in range(count):
        for layer in range(4):
            name = f"n{4 * block + layer}"
            nodes[name] = Node(
                name, "Linear", 1e-3, 2e-3, (8.0,), 4.0, stage=block * stages // count
            )
            modules[name] = f"net.block{block}" + f".layer{layer}" * (layer < 3)
            if nodes and name != "n0":
                edges.append((f"n{4 * block + layer - 1}", name))
        edges.append((f"n{4 * block}", f"n{4 * block + 3}"))
    return Graph(nodes, tuple(edges)), modules


def test_a_large_graph_is_drawn_by_its_modules(tmp_path: Path) -> None:
    """The picture of 444 nodes was 34,000 points high."""
    graph, modules = blocks(30, stages=4)
    few = condensed(graph, modules)
    assert len(few.nodes) == 30
    assert few.nodes["n0 to n3"].description == "net.block0, 4 nodes"
    assert few.edges[0] == ("n0 to n3", "n4 to n7")
    written = draw(graph, tmp_path / "graph", modules=modules).read_text()
    assert "net.block29, 4 nodes" in written
    assert "30 nodes" in written or "32 nodes" in written  # of a stage, not its boxes
    assert "Linear" in draw(*blocks(2)[:1], tmp_path / "small", modules=blocks(2)[1]).read_text()


def test_boxes_name_the_modules_of_their_layers(tmp_path: Path) -> None:
    """They said `Linear(in_features=256, out_features=64,...` of every layer."""
    graph, modules = blocks(2)
    long = "encoder.layers.0.attention.projection_of_the_values"
    written = draw(graph, tmp_path / "small", modules=modules | {"n4": long}).read_text()
    assert "net.block0.layer1: Linear" in written
    assert "...projection_of_the_values: Linear" in written


@pytest.mark.parametrize("most", [1, 4, 10, 60, 500])
@pytest.mark.parametrize("stages", [1, 3])
def test_what_is_joined_adds_up_and_stages_stay_apart(most: int, stages: int) -> None:
    graph, modules = blocks(30, stages)
    few = condensed(graph, modules, most)
    assert len(few.nodes) <= max(most, stages)
    for total in (lambda node: node.compute_seconds, lambda node: node.parameter_bytes):
        assert sum(map(total, few.nodes.values())) == pytest.approx(
            sum(map(total, graph.nodes.values()))
        )
    assert {node.stage for node in few.nodes.values()} == set(range(stages))
    assert len(few.order) == len(few.nodes)  # which raises where there is a cycle


def test_nodes_without_a_module_stay_alone() -> None:
    graph, modules = blocks(30)
    few = condensed(graph, dict.fromkeys(modules, ""), 10)
    assert few.nodes == graph.nodes
