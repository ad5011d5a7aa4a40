"""What rank 0 writes down as a run goes on."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.live import Live
from schedules import assigned
from torch.distributed import HashStore

from pipedream.graph.errors import UserError
from pipedream.runtime.data.order import Sizes
from pipedream.runtime.report.live_table import Display, keep_before, keep_until
from pipedream.runtime.report.metrics.writers import Writers
from pipedream.runtime.report.summary import Losses
from pipedream.runtime.run.training_segment import Position


def test_a_full_disk_is_told_by_all_that_wait_for_the_records(tmp_path: Path) -> None:
    """The thread that writes metrics.jsonl died with a traceback, and the next checkpoint waited
    for its lines until the timeout.
    """
    path = tmp_path / "metrics.jsonl"
    display = Display(path, Sizes(4, 2), 2, assigned([(0,)]), Writers({}), Position(0), list)
    losses = Losses(HashStore(), 1, 2)
    with display:
        display.file.close()
        display.file = Path("/dev/full").open("a")  # noqa: SIM115 - closed with the display
        with display.watching(losses):
            losses.send(0, torch.tensor(1.0))
            losses.send(1, torch.tensor(2.0))
            losses.end()
        problem = "metrics.jsonl: cannot be written: No space left on device"
        with pytest.raises(UserError, match=problem):
            display.end_epoch(losses)
        with pytest.raises(UserError, match=problem):
            display.has_recorded(Position(1))


def test_a_part_of_an_epoch_is_not_told_as_all_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run that goes on inside an epoch, or stops there."""
    display = Display(
        tmp_path / "metrics.jsonl",
        Sizes(8, 2),
        4,
        assigned([(0,)]),
        Writers({}),
        Position(0, 1),
        list,
    )
    losses = Losses(HashStore(), 1, 4, first=1)
    with display:
        for minibatch in (1, 2):
            losses.send(minibatch, torch.tensor(float(minibatch)))
        losses.end()
        display.end_epoch(losses)
    assert "epoch 1, minibatches 1 to 2: mean loss 1.5000, " in capsys.readouterr().err


@pytest.mark.parametrize(
    "keep", [lambda path: keep_before(path, Position(2)), lambda path: keep_until(path, 2)]
)
def test_records_are_never_half_written_over(keep: Callable[[Path], None], tmp_path: Path) -> None:
    """A run that was killed as it went on had emptied the file, and not written it yet."""
    path = tmp_path / "records.jsonl"
    lines = [json.dumps({"epoch": epoch, "minibatch": 0}) + "\n" for epoch in (1, 2, 3)]
    written = [lines[0], "not json\n", *lines[1:], '{"epoch": 1, "mini']
    path.write_text("".join(written))
    with path.open() as before:
        keep(path)
        assert before.readlines() == written
    assert path.read_text() == "".join(lines[:2])
    assert list(tmp_path.iterdir()) == [path]


def test_a_terminal_shows_that_the_run_drains_and_saves(tmp_path: Path) -> None:
    """Ctrl-C showed nothing until all was saved: the table was drawn over the launcher's line."""
    asked: list[bool] = []
    display = Display(
        tmp_path / "metrics.jsonl",
        Sizes(8, 2),
        4,
        assigned([(0,)]),
        Writers({}),
        Position(0),
        list,
        lambda: bool(asked),
    )
    screen = io.StringIO()
    display.console = Console(file=screen, force_terminal=True, width=120)
    display.live = Live(display.progress, console=display.console, auto_refresh=False)
    losses = Losses(HashStore(), 1, 4)
    with display:
        display._look(losses)
        assert "draining" not in screen.getvalue()
        asked.append(True)
        display._look(losses)
        display._look(losses)
    told = "interrupted; draining the pipeline and saving; Ctrl-C again to leave at once"
    assert screen.getvalue().count(told) == 1
