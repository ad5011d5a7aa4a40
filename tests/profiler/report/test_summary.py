from __future__ import annotations

import pytest
from profiled import layer, profile

from pipedream.graph.errors import UserError
from pipedream.profiler.report.summary import make_table, print_report

NET = profile(
    layer("small", forward=0.1, backward=0.1, output=10**6, parameter_bytes=7000),
    layer("large", forward=5, backward=4.8, output=10),
    layer("middle", "Conv2d", forward=0.06, backward=0.3, saved_bytes=999_000, workspace_bytes=1),
)


def rows(printed: str) -> list[str]:
    """The modules of a printed table, in its order."""
    lines = [line.split() for line in printed.splitlines() if line.startswith("node_")]
    return [words[1].rstrip(":") for words in lines]


ORDERS = {
    "time": ["large", "middle", "small"],
    "forward": ["large", "small", "middle"],
    "backward": ["large", "middle", "small"],
    "activations": ["small", "middle", "large"],
    "saved": ["middle", "small", "large"],
    "parameters": ["small", "large", "middle"],
    "workspace": ["small", "large", "middle"],
    "order": ["small", "large", "middle"],
}


@pytest.mark.parametrize("sort", ORDERS)
def test_the_table_is_sorted_as_asked(sort: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_report(NET, sort)
    out = capsys.readouterr().out
    assert rows(out) == ORDERS[sort]
    assert ("in execution order" if sort == "order" else f"of 3 nodes by {sort}") in out


def test_rows_have_times_sizes_and_their_share_of_what_is_sorted_by(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_report(NET, "time")
    (large,) = [line for line in capsys.readouterr().out.splitlines() if "large" in line]
    assert large.split("Linear")[1].split() == [
        "9.8", "ms", "5", "ms", "4.8", "ms", "2.4", "ms", "2.4", "ms",
        "10", "B", "50", "B", "40", "B", "70", "B", "94.6%",
    ]  # fmt: skip
    print_report(NET, "parameters")
    (small,) = [line for line in capsys.readouterr().out.splitlines() if "small" in line]
    assert small.endswith("98.9%")


def test_ten_rows_or_as_many_as_asked(capsys: pytest.CaptureFixture[str]) -> None:
    many = profile(*(layer(f"l{i}") for i in range(30)))
    for sort, top, count in (
        ("time", None, 10), ("time", 0, 30), ("time", 4, 4), ("time", 99, 30), ("order", None, 30),
        ("order", 5, 5),
    ):  # fmt: skip
        print_report(many, sort, top)
        assert len(rows(capsys.readouterr().out)) == count, (sort, top)


def test_what_the_profile_does_not_know_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    old = profile(layer("a", saved_bytes=None), layer("b", saved_bytes=None))
    print_report(old)
    assert "saved" not in capsys.readouterr().out
    with pytest.raises(UserError, match="--sort saved: this profile is from an older pd-profile"):
        print_report(old, "saved")


def test_a_narrow_page_loses_columns_not_names() -> None:
    labels = {"node": ["n1"], "layer": ["a" * 40]}
    numbers = {name: ["123 ms"] for name in "uvwxyz"}
    for width, kept in (
        (200, "uvwxyz"),
        (80, "uvwxyz"),
        (70, "uvwyz"),
        (60, "uwyz"),
        (50, "uwz"),
        (20, "u"),
    ):
        table = make_table("", labels, numbers, width, spare="xvyzw")
        assert [column.header for column in table.columns[2:]] == list(kept), width


def test_a_narrow_page_breaks_names_at_their_dots() -> None:
    """`model.layers.1.mlp.gate_pro` and `j: Linear` stood in two lines."""
    labels = {"node": ["n1"], "layer": ["model.layers.1.mlp.gate_proj: Linear"]}
    table = make_table("", labels, {"time": ["123 ms"]}, 40)
    assert list(table.columns[1].cells) == ["model.layers.1.mlp.\ngate_proj: Linear"]


def test_a_profile_whose_passes_vary_is_called_noisy(capsys: pytest.CaptureFixture[str]) -> None:
    """Only profiles without whole passes were, such as those of --meta."""
    noisy = "Noisy: passes vary by more than 10%"
    print_report(profile(layer("a"), pass_seconds=(1.0, 1.05, 1.1, 1.2)))
    assert noisy not in capsys.readouterr().out
    print_report(profile(layer("a"), pass_seconds=(1.0, 1.0, 1.5, 1.6)))
    assert noisy in capsys.readouterr().out


def test_drift_is_told_from_what_differs_from_pass_to_pass(
    capsys: pytest.CaptureFixture[str],
) -> None:
    drifting = tuple(1.0 + 0.001 * number for number in range(100))
    print_report(profile(layer("a"), pass_seconds=drifting))
    assert "The machine drifted by 2.8% meanwhile" in " ".join(capsys.readouterr().out.split())
    beside = {"pass_seconds_beside": (drifting[::-1],)}
    print_report(profile(layer("a"), pass_seconds=drifting, **beside))
    said = " ".join(capsys.readouterr().out.split())
    assert "to pass; each worker by 2.8% of its own, so that others wait for it." in said
    print_report(profile(layer("a"), pass_seconds=(1.0, 1.1, 1.0, 1.1, 1.0)))
    assert "drifted" not in capsys.readouterr().out
