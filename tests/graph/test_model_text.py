"""graph.txt: what is read, what is written, and what is said of a file that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipedream.graph.errors import UserError
from pipedream.graph.model import Graph, Node, format_graph, parse_graph, read_graph

PUBLISHED = sorted((Path(__file__).parents[2] / "../shared/reference/profiles").glob("*/graph.txt"))

# Every form the published profiles have: inputs, lists, descriptions with " -- " and double spaces.
CANONICAL = """\
node1 -- Input0 -- forward_compute_time=0.000, backward_compute_time=0.000, activation_size=0.0, \
parameter_size=0.000
node4 -- Embedding(32320, 1024, padding_idx=0) -- forward_compute_time=0.073, \
backward_compute_time=6.949, activation_size=6291456.0, parameter_size=132382720.000
node7 -- LSTM(  (a): X -- Y) -- forward_compute_time=3.190, backward_compute_time=5.348, \
activation_size=[6291456.0; 131072.0; 131072.0], parameter_size=50364416.000
node8 -- __getitem__(0) -- forward_compute_time=0.000, backward_compute_time=0.000, \
activation_size=[6291456.0], parameter_size=0.000 -- stage_id=12
\tnode1 -- node4
\tnode4 -- node7
\tnode7 -- node8"""

FIELDS = (
    "forward_compute_time=1.000, backward_compute_time=2.000, activation_size=3.0, "
    "parameter_size=4.000"
)


def node_line(name: str, **changed: str) -> str:
    """A good node line, with the fields in `changed` set to another text."""
    fields = dict(part.split("=") for part in FIELDS.split(", ")) | changed
    return f"{name} -- Linear -- " + ", ".join(f"{key}={value}" for key, value in fields.items())


# Descriptions are free text on one line; a line break in one would be another line of the file.
descriptions = st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), max_size=12)
milliseconds = st.integers(0, 10**9).map(lambda thousandths: thousandths / 1000)


@st.composite
def graphs(draw: st.DrawFn, decimals: int = 1) -> Graph:
    """Random acyclic graphs whose times and sizes have the decimals that the text form keeps."""
    sizes = st.integers(0, 10**12).map(lambda tenths: tenths / 10**decimals)
    count = draw(st.integers(1, 8))
    order = draw(st.permutations(range(count)))
    nodes = {}
    for index in order:
        several = draw(st.booleans())
        nodes[f"n{index}"] = Node(
            id=f"n{index}",
            description=draw(descriptions),
            forward_seconds=draw(milliseconds) / 1e3,
            backward_seconds=draw(milliseconds) / 1e3,
            activation_bytes=tuple(
                draw(st.lists(sizes, min_size=1, max_size=3 if several else 1)),
            ),
            parameter_bytes=float(draw(st.integers(0, 10**12))),
            stage=draw(st.none() | st.integers(0, 99)),
            several_outputs=several,
        )
    pairs = [(f"n{a}", f"n{b}") for b in range(count) for a in range(b)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    return Graph(nodes, tuple(edges), decimals)


@pytest.mark.slow
@given(graphs())
def test_a_graph_written_and_read_is_the_same_graph(graph: Graph) -> None:
    again = parse_graph(format_graph(graph))
    assert again == graph
    assert list(again.nodes) == list(graph.nodes)
    assert again.fingerprint == graph.fingerprint


@pytest.mark.slow
@given(graphs(decimals=3))
def test_sizes_with_three_decimals_stay_so(graph: Graph) -> None:
    text = format_graph(graph)
    assert format_graph(parse_graph(text)) == text


def test_canonical_text_is_written_byte_for_byte() -> None:
    assert format_graph(parse_graph(CANONICAL)) == CANONICAL


@pytest.mark.skipif(not PUBLISHED, reason="the published profiles are not beside this repository")
@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.parent.name)
def test_published_profiles_are_written_byte_for_byte(path: Path) -> None:
    assert format_graph(read_graph(path)).encode() == path.read_bytes()


def test_numbers_become_seconds_and_bytes() -> None:
    graph = parse_graph(CANONICAL)
    node = graph.nodes["node7"]
    assert node.description == "LSTM(  (a): X -- Y)"
    assert node.forward_seconds == pytest.approx(3.190e-3)
    assert node.compute_seconds == pytest.approx(8.538e-3)
    assert node.activation_bytes == (6291456, 131072, 131072)
    assert node.output_bytes == 6553600
    assert graph.nodes["node8"].stage == 12
    assert graph.nodes["node8"].several_outputs
    assert graph.nodes["node1"].is_input
    assert graph.predecessors["node7"] == ("node4",)
    assert graph.successors["node7"] == ("node8",)


@pytest.mark.parametrize(
    "sloppy",
    [
        CANONICAL + "\n",
        CANONICAL.replace("\n", "\n\n \n"),
        CANONICAL.replace("\n", "\r\n"),
        CANONICAL.replace("\n", "  \n"),
        "\n".join(reversed(CANONICAL.split("\n")[4:])) + "\n" + CANONICAL,
        CANONICAL.replace("\t", "    "),
        CANONICAL.replace(", ", ","),
        CANONICAL.replace("; ", ";"),
    ],
    ids=["newline", "blank", "crlf", "spaces", "edges-first", "no-tab", "commas", "lists"],
)
def test_sloppy_text_is_understood(sloppy: str) -> None:
    graph = parse_graph(sloppy)
    expected = parse_graph(CANONICAL)
    assert set(graph.edges) == set(expected.edges)
    for name, node in expected.nodes.items():
        found = graph.nodes[name]
        assert found.description.replace(" ", "") == node.description.replace(" ", "")
        assert (found.forward_seconds, found.stage) == (node.forward_seconds, node.stage)
        assert found.activation_bytes == node.activation_bytes


def test_a_byte_order_mark_is_no_part_of_the_first_name(tmp_path: Path) -> None:
    path = tmp_path / "graph.txt"
    path.write_text(CANONICAL, encoding="utf-8-sig")
    assert next(iter(read_graph(path).nodes)) == "node1"


def test_only_a_newline_ends_a_line() -> None:
    line = node_line("a").replace("Linear", "Odd(\x0b\x0c\x1c\x85\u2028)")
    assert parse_graph(line).nodes["a"].description == "Odd(\x0b\x0c\x1c\x85\u2028)"


GOOD = node_line("a")


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("", 1, "no node"),
        ("\n\n\t\n", 4, "no node"),
        (f"{GOOD}\nb\n", 2, "write ID -- DESCRIPTION"),
        (f"{GOOD}\nb -- Linear", 2, "write ID -- DESCRIPTION"),
        (f"{GOOD}\nb -- Linear -- nothing", 2, "forward_compute_time is missing"),
        (f"{GOOD}\n" + node_line("b").partition(", parameter")[0], 2, "parameter_size is missing"),
        (f"{GOOD}\n\n{GOOD}", 3, "node a is given twice"),
        (f"{GOOD}\n" + GOOD.replace("a -- ", "a  -- "), 2, "node a is given twice"),
        (node_line("a", forward_compute_time="-0.1"), 1, "it must be at least 0"),
        (node_line("a", backward_compute_time="nan"), 1, "it must be at least 0"),
        (node_line("a", parameter_size="inf"), 1, "it must be at least 0"),
        (node_line("a", parameter_size="many"), 1, "parameter_size is 'many', not a number"),
        (node_line("a", forward_compute_time=""), 1, "forward_compute_time is '', not a number"),
        (node_line("a", activation_size="[1.0; -2.0]"), 1, "it must be at least 0"),
        (node_line("a", activation_size="[]"), 1, "activation_size is '', not a number"),
        (node_line("a", activation_size="[1.0; 2.0"), 1, "not a number"),
        (f"{GOOD} -- stage_id=first", 1, "stage_id is 'first'"),
        (f"{GOOD} -- stage_id=-1", 1, "stage_id is '-1'"),
        (f"{GOOD}\n\ta -- nowhere", 2, "there is no node nowhere"),
        (f"\n\tnowhere -- a\n{GOOD}", 2, "there is no node nowhere"),
        (f"{GOOD}\n\ta", 2, "write a tab and ID -- ID"),
        (f"{GOOD}\n\ta -- a -- a", 2, "write a tab and ID -- ID"),
        (f"{GOOD}\n\ta -- a", 2, "cycle a -- a"),
        (f"{GOOD}\n{node_line('b')}\n\ta -- b\n\tb -- a", 4, "cycle a -- b -- a"),
    ],
)
def test_a_malformed_file_is_refused_with_its_line(text: str, line: int, says: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_graph(text)
    message = caught.value.format_message()
    assert message.startswith(f"graph.txt:{line}: "), message
    assert says in message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("content", "says"), [(None, "No such file"), (b"\xff\xfe\x00", "not a text file")]
)
def test_a_file_that_is_no_text_is_refused(
    tmp_path: Path, content: bytes | None, says: str
) -> None:
    path = tmp_path / "graph.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=says):
        read_graph(path)
    with pytest.raises(UserError, match="Is a directory"):
        read_graph(tmp_path)


def test_a_number_whose_sums_would_not_be_finite_is_named():
    line = "a -- A -- forward_compute_time=1, backward_compute_time=1, activation_size=1.7e308"
    with pytest.raises(UserError, match=r"graph.txt:1: activation_size .* less than 1e\+100"):
        parse_graph(line + ", parameter_size=1")
