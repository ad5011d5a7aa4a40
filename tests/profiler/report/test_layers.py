from __future__ import annotations

import csv
import itertools
import json
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from profiled import layer, profile

from pipedream.graph.profile import Profile, write_profile
from pipedream.profiler.report.layers import layer_names, layers_frame
from pipedream.profiler.report.layers_picture import draw_layers

NET = profile(
    layer("", "Input0", 0, 0, parameter_bytes=0),
    layer("a.b", "Conv2d", 3, 5, 1000, saved_bytes=900, parameter_bytes=36),
    layer("a", "Add", 0.5, 0.5, 2000, spread=0.2),
)


def test_csv_has_what_profile_json_has(tmp_path: Path) -> None:
    write_profile(NET, tmp_path / "profile.json")
    layers_frame(NET).to_csv(tmp_path / "layers.csv", index=False)
    with (tmp_path / "layers.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    nodes = json.loads((tmp_path / "profile.json").read_text())["nodes"]
    assert [row["id"] for row in rows] == [node["id"] for node in nodes]
    for row, node in zip(rows, nodes, strict=True):
        assert (row["module"], row["op"]) == (node["module"], node["op"])
        for which in ("forward", "backward", "backward_input", "backward_weight"):
            measured = node[f"{which}_seconds"]
            assert float(row[f"{which}_seconds"]) == measured["median"]
            assert float(row[f"{which}_lower_seconds"]) == measured["lower"]
            assert float(row[f"{which}_upper_seconds"]) == measured["upper"]
        assert row["output_bytes"] == str(node["outputs"][0]["bytes"])
        for size in ("saved_bytes", "kept_bytes", "workspace_bytes", "parameter_bytes"):
            assert row[size] == str(node[size])
    assert [float(row["seconds"]) for row in rows] == pytest.approx([0, 8e-3, 1e-3])
    assert [float(row["share"]) for row in rows] == pytest.approx([0, 8 / 9, 1 / 9])


def test_what_an_older_profile_does_not_know_is_empty(tmp_path: Path) -> None:
    unknown = dict.fromkeys(("saved_bytes", "backward_input_seconds"))
    old = profile(layer("a", **unknown), layer("b", **unknown))
    layers_frame(old).to_csv(tmp_path / "layers.csv", index=False)
    with (tmp_path / "layers.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for column in ("saved_bytes", "backward_input_seconds", "backward_input_lower_seconds"):
        assert [row[column] for row in rows] == ["", ""]


def test_a_layer_is_called_by_its_module_and_operator() -> None:
    assert layer_names(layers_frame(NET)) == ["Input0", "a.b: Conv2d", "a: Add"]


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were saved, in their order."""
    figures: list[Figure] = []
    save = Figure.savefig

    def keep(self: Figure, *args: object, **options: object) -> None:
        figures.append(self)
        save(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def picture(of: Profile, path: Path, drawn: list[Figure]) -> Figure:
    draw_layers(of, path / "layers.png")
    assert (path / "layers.png").read_bytes().startswith(b"\x89PNG")
    return drawn[-1]


def bars(axes: Axes) -> list[tuple[list[float], list[float]]]:
    """Where the bars of each kind begin, and how high they are."""
    found = []
    for collection in axes.collections:
        ends = [path.get_extents().intervaly for path in collection.get_paths()]
        found.append(([low for low, _ in ends], [high - low for low, high in ends]))
    return found


def test_a_bar_for_each_node_and_what_it_is_of(tmp_path: Path, drawn: list[Figure]) -> None:
    figure = picture(NET, tmp_path, drawn)
    time, activations, parameters, *shares = figure.axes
    (_, forward), (begins, backward) = bars(time)
    assert forward == pytest.approx([0, 3e-3, 5e-4])
    assert backward == pytest.approx([0, 5e-3, 5e-4])
    assert begins == pytest.approx(forward), "backward on forward"
    assert bars(activations) == [([0, 0, 0], [100, 1000, 2000]), ([0, 0, 0], [50, 900, 50])]
    assert bars(parameters) == [([0, 0, 0], [0, 36, 40])]
    curves = [list(line.get_ydata()) for axes in shares for line in axes.lines]
    assert curves[0] == pytest.approx([0, 8 / 9, 1])
    assert curves[1] == pytest.approx([0.05, 0.95, 1]), "saved"
    assert curves[2] == pytest.approx([100 / 3100, 1100 / 3100, 1]), "output"
    assert curves[3] == pytest.approx([0, 36 / 76, 1])
    labels = [text.get_text() for text in parameters.get_xticklabels()]
    assert labels == ["Input0", "a.b: Conv2d", "a: Add"]
    assert "a.b: Conv2d (89%)" in time.get_title(loc="left")


@pytest.mark.thorough
def test_of_many_nodes_modules_are_named(tmp_path: Path, drawn: list[Figure]) -> None:
    nodes = [layer(f"block{i}.{part}") for i in range(20) for part in range(20)]
    *_, last, _, _, _ = picture(profile(*nodes), tmp_path, drawn).axes
    assert len(last.collections[0].get_paths()) == 400
    names = {
        place: text.get_text()
        for place, text in zip(last.get_xticks(), last.get_xticklabels(), strict=True)
    }
    assert names == {9.5 + 20 * i: f"block{i}" for i in range(20)}


@pytest.mark.thorough
def test_names_never_touch(tmp_path: Path, drawn: list[Figure]) -> None:
    """All modules side by side: there is no room for all, and nothing to group them by."""
    figure = picture(profile(*(layer(str(i)) for i in range(400))), tmp_path, drawn)
    boxes = sorted(
        (label.get_window_extent().x0, label.get_window_extent().x1)
        for label in figure.axes[2].get_xticklabels()
    )
    assert len(boxes) > 50
    assert all(left[1] <= right[0] for left, right in itertools.pairwise(boxes))


def test_what_an_older_profile_does_not_know_is_not_drawn(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    old = profile(layer("a", saved_bytes=None, parameter_bytes=None))
    _, activations, *shares = picture(old, tmp_path, drawn).axes
    assert (len(activations.collections), len(shares)) == (1, 2)


def test_a_profile_of_nothing_but_an_input_is_drawn(tmp_path: Path, drawn: list[Figure]) -> None:
    nothing = layer("", "Input0", 0, 0, 0, parameter_bytes=0, saved_bytes=0)
    assert not picture(profile(nothing), tmp_path, drawn).axes[0].lines
