"""What profile.json says of how sure its times are."""

import json

import pytest

from pipedream.graph.command import UserError
from pipedream.graph.model import Graph, Node
from pipedream.graph.timings import read_timings

GRAPH = Graph({name: Node(name, f"Linear({name})") for name in "ab"}, (("a", "b"),))


def written(path, names, **fields):
    def seconds(lower, upper):
        return {"median": 1.0, "lower": lower, "upper": upper, "something": "else"}

    nodes = [
        {"id": name, "forward_seconds": seconds(1.0, 1.5), "backward_seconds": seconds(2.0, 2.0)}
        for name in names
    ]
    data = {"format": "pipedream-profile/1", "graph_fingerprint": GRAPH.fingerprint}
    path.write_text(json.dumps({**data, "batch_size": 8, "nodes": nodes, "more": 1, **fields}))
    return path


def test_half_of_what_the_quartiles_are_apart(tmp_path):
    found = read_timings(written(tmp_path / "profile.json", "ab"), GRAPH)
    assert found.batch_size == 8
    assert found.forward == {"a": 0.25, "b": 0.25}
    assert found.backward == {"a": 0.0, "b": 0.0}


@pytest.mark.parametrize("fields", [{"graph_fingerprint": "other"}, {"nodes": []}])
def test_the_profile_of_another_graph_is_refused(tmp_path, fields):
    path = written(tmp_path / "profile.json", "ab", **fields)
    with pytest.raises(UserError, match=r"profile.json: the profile of another graph"):
        read_timings(path, GRAPH)
