from __future__ import annotations

import pytest
from profiled import MACHINE, layer, profile

from pipedream.graph.errors import UserError
from pipedream.graph.profile import Profile, ProfiledNode
from pipedream.profiler.report.diff import Diff, differing_settings, print_diff
from pipedream.profiler.report.layers import QUANTITIES

NODES = (layer("one"), layer("two", forward=4), layer("act", "ReLU", 0.2, 0.1, parameter_bytes=0))
NET = profile(*NODES)


def told(a: Profile, b: Profile, capsys: pytest.CaptureFixture[str], sort: str = "time") -> str:
    print_diff(Diff(a, b), sort)
    return capsys.readouterr().out


def differing(a: Profile, b: Profile) -> dict[str, list[str]]:
    """For each quantity the modules that differ in it."""
    diff = Diff(a, b)
    found = {name: diff.differs(name) for name in QUANTITIES}
    return {
        name: [module for (module, _, _), yes in flags.items() if yes]
        for name, flags in found.items()
        if flags.any()
    }


def with_node(place: int, node: ProfiledNode, **changes: object) -> Profile:
    nodes = [*NODES]
    nodes[place] = node
    return profile(*nodes, **changes)


def test_a_profile_and_itself_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert differing(NET, NET) == {}
    table = Diff(NET, NET).table()
    assert len(table) == 3
    assert (table.filter(like="_change") == 0).all(axis=None)
    out = told(NET, NET, capsys)
    assert "Same machine, versions, batch size and model." in out
    assert "No node differs." in out


def test_a_time_differs_where_its_quartiles_leave_a_gap() -> None:
    """1 ms with quartiles 0.9 and 1.1 ms."""
    slower = lambda median: with_node(0, layer("one", forward=median, spread=0.1))  # noqa: E731
    assert differing(NET, slower(1.2)) == {}, "from 1.08 ms on"
    assert differing(NET, slower(0.85)) == {}, "up to 0.935 ms"
    assert differing(NET, slower(1.3)) == {"forward": ["one"]}, "3.3 ms is near to 3 ms in all"
    assert differing(NET, slower(0.7)) == {"forward": ["one"]}
    assert differing(NET, slower(3.0)) == {"time": ["one"], "forward": ["one"]}


def test_a_wider_layer_and_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    wider = with_node(1, layer("two", forward=8, output=200, saved_bytes=60, parameter_bytes=80))
    assert differing(NET, wider) == {
        name: ["two"] for name in ("time", "forward", "activations", "saved", "parameters")
    }
    out = told(NET, wider, capsys)
    (row,) = [line for line in out.splitlines() if "Linear" in line]
    assert row.split() == [
        "two:", "Linear", "6", "ms", "10", "ms", "+4", "ms*", "+66.7%", "+4", "ms*", "+100", "B*",
        "+10", "B*", "+40", "B*",
    ]  # fmt: skip
    assert "1 of 3 nodes changed, 1 beyond the spread" in out
    totals = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line}
    assert totals["parameters"] == ["80", "B", "120", "B", "+40", "B", "+50.0%", "1"]
    assert totals["workspace"] == ["210", "B", "210", "B", "0"]


def test_layers_in_one_of_them_alone(capsys: pytest.CaptureFixture[str]) -> None:
    other = profile(NODES[0], layer("new", "Conv2d", parameter_bytes=9), NODES[2])
    diff = Diff(NET, other)
    assert list(diff.frame.index) == [
        ("one", "Linear", 1), ("two", "Linear", 1), ("act", "ReLU", 1), ("new", "Conv2d", 1),
    ]  # fmt: skip
    assert list(diff.change("parameters")) == [0, -40, 0, 9]
    assert list(diff.change("time")) == pytest.approx([0, -6e-3, 0, 3e-3])
    out = told(NET, other, capsys)
    assert "Only in A: two: Linear.\nOnly in B: new: Conv2d.\n" in out
    assert [line.split()[0] for line in out.splitlines() if "only in" in line] == ["two:", "new:"]


def test_calls_of_one_module_are_told_apart_by_their_order() -> None:
    twice = profile(layer("act", "ReLU", output=1), layer("act", "ReLU", output=2))
    thrice = profile(*twice.nodes, layer("act", "ReLU", output=3))
    assert list(Diff(twice, thrice).change("activations")) == [0, 0, 3]
    assert list(Diff(thrice, twice).only_in_a) == [False, False, True]


def test_large_changes_come_first_and_those_within_the_spread_last(
    capsys: pytest.CaptureFixture[str],
) -> None:
    a = profile(*(layer(name, spread=0.01) for name in "abc"), layer("d", spread=0.9))
    b = profile(
        layer("a", forward=1.1, spread=0.01),
        layer("b", forward=1.1, backward=1.5, spread=0.01),
        layer("c", spread=0.01),
        layer("d", forward=1.9, spread=0.9),
    )
    lines = told(a, b, capsys).splitlines()
    assert [line.split(":")[0] for line in lines if "Linear" in line] == ["b", "a", "d"]
    assert [line.count("*") for line in lines if "Linear" in line] == [5, 2, 0]
    by_forward = told(a, b, capsys, "forward").splitlines()
    assert [line.split(":")[0] for line in by_forward if "Linear" in line] == ["a", "b", "d"]
    in_order = told(b, a, capsys, "order").splitlines()
    assert [line.split(":")[0] for line in in_order if "Linear" in line] == ["a", "b", "d"]


def test_of_other_batch_sizes_examples_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """Twice the batch, at twice the time but for one layer; parameters do not grow with it."""
    b = profile(
        layer("one", forward=2, backward=4, output=200, saved_bytes=100, workspace_bytes=140),
        layer("two", forward=4, backward=4, output=200, saved_bytes=100, workspace_bytes=140),
        layer("act", "ReLU", 0.4, 0.2, 200, saved_bytes=100, workspace_bytes=140,
              parameter_bytes=0),
        batch_size=16,
    )  # fmt: skip
    assert differing(NET, b) == {"time": ["two"], "forward": ["two"]}
    assert Diff(NET, b).change("time").to_list() == pytest.approx([0, -2e-3 / 8, 0])
    assert {"seconds_change_per_example", "parameter_bytes_change"} < {*Diff(NET, b).table()}
    out = told(NET, b, capsys)
    assert "Different: batch size 8 and 16." in out
    assert "1 beyond the spread; per example" in out
    (row,) = [line for line in out.splitlines() if "two:" in line]
    assert row.split()[2:8] == ["750", "us", "500", "us", "-250", "us*"]
    totals = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line}
    assert totals["forward"] == ["5.2", "ms", "6.4", "ms", "+1.2", "ms", "+23.1%", "-38.5%", "1"]
    assert totals["parameters"] == ["80", "B", "80", "B", "0"]


def test_what_else_is_different_is_told_first(capsys: pytest.CaptureFixture[str]) -> None:
    other = NET.model_copy(
        update={
            "machine": MACHINE.model_copy(update={"torch": "2.12", "device_name": "quipu"}),
            "repeats": 1,
        }
    )
    assert list(differing_settings(NET, other)) == ["device_name", "torch", "repeats"]
    slower = other.model_copy(update={"nodes": (layer("one", forward=3, spread=0), *NODES[1:])})
    lines = told(NET, slower, capsys).splitlines()
    assert (
        lines[2] == "Different: device name abacus and quipu; torch 2.13 and 2.12; repeats 5 and 1."
    )
    assert "B was timed once" in lines[-1]


def test_what_one_of_them_does_not_know_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    old = profile(*(node.model_copy(update={"saved_bytes": None}) for node in NODES))
    assert "No node differs." in told(old, NET, capsys)
    assert differing(NET, old) == {}
    with pytest.raises(UserError, match="--sort saved"):
        print_diff(Diff(NET, old), "saved")
