import importlib.util
import json
from pathlib import Path

import pytest
from commands import typed
from sharded_runs import PROFILE, write_config

from pipedream.graph.model import Graph, Node

REFERENCE = Path(__file__).parents[2] / "../shared/reference"


@pytest.fixture(scope="session")
def by_hand():
    """tests/optimizer/by_hand.py: the independent reference."""
    spec = importlib.util.spec_from_file_location("by_hand", Path(__file__).with_name("by_hand.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def expected():
    """The published optima; skips where they are absent."""
    path = REFERENCE / "expected.json"
    if not path.exists():
        pytest.skip("no reference data here")
    return json.loads(path.read_text())


@pytest.fixture(scope="session")
def profile():
    """Reads a published profile by name; skips where they are absent."""
    from pipedream.graph.model import read_graph

    def read(name):
        path = REFERENCE / "profiles" / name / "graph.txt"
        if not path.exists():
            pytest.skip("no reference data here")
        return read_graph(path)

    return read


@pytest.fixture(scope="session")
def make_graph():
    """make_graph("a b c", "a-b b-c", a=(ms, output bytes, parameter bytes), ...)."""

    def make(names, edges="", **costs):
        nodes = {}
        for name in names.split():
            milliseconds, outputs, parameters = costs.get(name, (1, 100, 1000))
            nodes[name] = Node(
                id=name,
                description=f"Linear({name})",
                forward_seconds=milliseconds * 1e-3,
                activation_bytes=(float(outputs),),
                parameter_bytes=float(parameters),
            )
        return Graph(nodes, tuple(tuple(edge.split("-")) for edge in edges.split()))

    return make


@pytest.fixture(scope="session")
def perceptron(tmp_path_factory):
    """A folder with the profile of a perceptron, with its operators, and their run config."""
    folder = tmp_path_factory.mktemp("profiled")
    data = {"source": "sharded_models:points", "args": {"examples": 200}}
    write_config(folder, "Perceptron", microbatches=2, evaluate_every=None, data=data)
    done = typed(folder, PROFILE)
    assert done.code == 0, done.error
    return folder
