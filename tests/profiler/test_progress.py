from __future__ import annotations

import sys
import time

import pytest

from pipedream.profiler import progress as module
from pipedream.profiler.progress import progress


def test_where_there_is_no_terminal_lines_say_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profile of a large model said nothing for a quarter of an hour."""
    monkeypatch.setattr(module, "_EVERY_SECONDS", 0.2)
    said = []
    with progress() as step:
        for what, done, total in (("capturing", 0.0, 0.0), ("timing", 0.25, 1.0)):
            step(what, done, total)
            deadline = time.monotonic() + 20
            while not said[-1:] or what not in said[-1]:
                assert time.monotonic() < deadline
                time.sleep(0.05)
                said += capsys.readouterr().err.splitlines()
    assert said[0] == "pd-profile: capturing after 0 s"
    assert said[-1].startswith("pd-profile: timing, 25% after ")


def test_a_short_measurement_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress() as step:
        step("timing", 1.0, 1.0)
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress() as step:
        step("timing", 0.5, 1.0)
    assert "timing" in capsys.readouterr().err
