"""What groups are said to be."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from rich.console import Console

from pipedream.graph.model import Graph, Node
from pipedream.optimizer.cuts.groups import classes_of, fusion_groups
from pipedream.optimizer.cuts.planning_graph import PlanningGraph
from pipedream.optimizer.report.groups_table import groups_table


def network() -> Graph:
    """Two equal blocks of convolution, norm and activation, the second heavier, and a layer."""
    layers = ["Conv2d(3, 8)", "BatchNorm2d(8)", "ReLU()"] * 2 + ["Linear(8, 8)"]
    names = [f"node{number}" for number in range(len(layers))]
    nodes = {
        name: Node(name, layer, forward_seconds=1e-3, activation_bytes=(1000.0,))
        for name, layer in zip(names, layers, strict=True)
    }
    nodes["node6"] = replace(nodes["node6"], forward_seconds=2e-3)
    return Graph(nodes, tuple(pairwise(names)))


def test_equal_groups_are_one_row() -> None:
    graph = network()
    classes = classes_of(graph, None)
    groups = fusion_groups(PlanningGraph.of(graph), classes)
    console = Console(width=100, record=True)
    console.print(groups_table(graph, groups, classes))
    rows = [line.split() for line in console.export_text().splitlines()]
    assert ["2", "complicated", "6", "ms", "4", "kB", "Conv2d,", "BatchNorm2d,", "ReLU"] in rows
    assert ["1", "complicated", "2", "ms", "0", "B", "Linear"] in rows


def test_many_kinds_end_in_a_sum() -> None:
    nodes = {f"node{k}": Node(f"node{k}", f"Layer{k}()", forward_seconds=1e-3) for k in range(11)}
    graph = Graph(nodes, tuple(pairwise(nodes)))
    groups = [[name] for name in nodes]
    console = Console(width=200, record=True)
    console.print(groups_table(graph, groups, classes_of(graph, None)))
    assert "3 more groups take 3 ms." in " ".join(console.export_text().split())
