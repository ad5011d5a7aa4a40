"""The coordinates of the chart of losses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipedream.runtime.report.page.loss_chart import HEIGHT, WIDTH, loss_chart


def write(folder: Path, losses: list[float], minibatches: int) -> None:
    lines = [
        {"epoch": number // minibatches + 1, "minibatch": number % minibatches, "loss": loss}
        for number, loss in enumerate(losses)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def points(text: str) -> list[tuple[float, float]]:
    pairs = (pair.split(",") for pair in text.split())
    return [(float(x), float(y)) for x, y in pairs]


def test_few_losses_are_points_of_the_line(tmp_path: Path) -> None:
    write(tmp_path, [3.0, 1.0, 2.0, 1.0], minibatches=4)
    chart = loss_chart(tmp_path, 4)
    assert chart is not None
    quarter = WIDTH / 4
    assert points(chart.line) == [
        (quarter, 0.0),
        (2 * quarter, HEIGHT),
        (3 * quarter, HEIGHT / 2),
        (4 * quarter, HEIGHT),
    ]
    assert chart.band == ""
    assert [(tick.position, tick.text) for tick in chart.x_ticks] == [
        (pytest.approx(n * quarter), str(n)) for n in range(5)
    ]
    assert [tick.text for tick in chart.y_ticks] == ["1", "1.5", "2", "2.5", "3"]
    assert (chart.y_ticks[0].position, chart.y_ticks[-1].position) == (HEIGHT, 0.0)
    assert chart.x_name == "minibatch"


def test_many_losses_become_means_with_a_band(tmp_path: Path) -> None:
    """Losses alternate between 1 and 3 and fall to 0 and 2 in the second half."""
    write(tmp_path, [1.0, 3.0] * 1000 + [0.0, 2.0] * 1000, minibatches=1000)
    chart = loss_chart(tmp_path, 1000)
    assert chart is not None
    line = points(chart.line)
    assert len(line) <= 210
    assert (line[0][1], line[-1][1]) == (0.0, HEIGHT)
    assert [x for x, _ in line] == sorted(x for x, _ in line)
    upper, *_, lower = points(chart.band)
    assert upper[1] < line[0][1] < lower[1]
    assert [tick.text for tick in chart.x_ticks] == ["0", "1", "2", "3", "4"]
    assert chart.x_name == "epoch"


def test_held_out_losses_stand_at_the_ends_of_epochs(tmp_path: Path) -> None:
    write(tmp_path, [2.0, 2.0, 1.0, 1.0], minibatches=2)
    lines = [{"epoch": 1, "held_out_loss": 2.0}, {"epoch": 2, "held_out_loss": float("nan")}]
    (tmp_path / "held_out.jsonl").write_text("\n".join(map(json.dumps, lines)))
    chart = loss_chart(tmp_path, 2)
    assert chart is not None
    assert list(chart.held_out) == [(WIDTH / 2, 0.0)]


def test_losses_that_are_not_finite_are_no_points(tmp_path: Path) -> None:
    write(tmp_path, [2.0, float("nan"), float("inf"), 1.0], minibatches=4)
    chart = loss_chart(tmp_path, 4)
    assert chart is not None
    assert points(chart.line) == [(WIDTH / 4, 0.0), (WIDTH, HEIGHT)]
    write(tmp_path, [2.0, float("nan")], minibatches=2)
    assert loss_chart(tmp_path, 2) is None


def test_a_constant_loss_has_a_line_and_ticks(tmp_path: Path) -> None:
    for loss in (0.0, 0.7, 1e-12, -3.0):
        write(tmp_path, [loss] * 3, minibatches=3)
        chart = loss_chart(tmp_path, 3)
        assert chart is not None
        assert {y for _, y in points(chart.line)} == {HEIGHT / 2}
        assert len(chart.y_ticks) > 2
