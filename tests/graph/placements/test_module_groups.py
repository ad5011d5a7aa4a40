"""Which nodes go together, by the paths of their modules."""

from __future__ import annotations

import pytest

from pipedream.graph.placements.module_groups import module_groups

CASES = {
    "blocks of a transformer": "embed | h.0.norm h.0.mlp h.0 | h.1.norm h.1.mlp h.1 | head",
    "blocks deep in a model": "m.embed | m.h.0.a m.h.0.b | m.h.1.a | m.norm | head",
    "stages of blocks": "conv1 | layer1.0.conv layer1.0 layer1.0.relu | layer2.0.conv | fc",
    "layers of a list": "features.0 features.1 features.2 | classifier.0 classifier.1",
    "layers alone": "0 1 2",
    "lists of lists": "0.0 0.1 | 1.0 1.1.0 | 2",
    "a block that is called twice": "h.0.a | h.1.a | h.0.a h.0.b",
    "one of many layers": "a.x a.y.0 a.y.1 a | b.x",
}


@pytest.mark.parametrize("name", CASES)
def test_consecutive_nodes_of_an_element_go_together(name: str) -> None:
    groups = [part.split() for part in CASES[name].split(" | ")]
    paths = [path for group in groups for path in group]
    nodes = [f"node{k}" for k in range(len(paths))]
    found = module_groups(nodes, dict(zip(nodes, paths, strict=True)))
    assert [[paths[nodes.index(node)] for node in group] for group in found] == groups
