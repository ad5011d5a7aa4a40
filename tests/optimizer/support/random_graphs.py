"""Small random graphs for the planner's property tests."""

from hypothesis import assume
from hypothesis import strategies as st

from pipedream.graph.model import Graph, Node


@st.composite
def graphs(draw, most=10):
    """DAGs of 1 to `most` nodes, in any shape; some nodes free, some without parameters."""
    count = draw(st.integers(1, most))
    pairs = [(a, b) for b in range(count) for a in range(max(0, b - 4), b)]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    step = draw(st.sampled_from([1, 1, 1, 2]))
    edges = sorted({*chosen, *((a, b) for a, b in pairs if b - a == step)})
    number = st.integers(0, 9)
    nodes = {
        f"n{i}": Node(
            id=f"n{i}",
            description=f"Layer{i}",
            forward_seconds=draw(number) * 1e-3,
            backward_seconds=draw(number) * 1e-3,
            activation_bytes=(draw(number) * 1e5, draw(st.sampled_from([0, 1])) * 1e5),
            parameter_bytes=draw(number) * 1e6,
        )
        for i in range(count)
    }
    assume(any(node.compute_seconds for node in nodes.values()))
    return Graph(nodes, tuple((f"n{a}", f"n{b}") for a, b in edges))
