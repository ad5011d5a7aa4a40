from __future__ import annotations

from pathlib import Path

import pytest

from pipedream.graph.command import UserError
from pipedream.graph.upkeep import Upkeep, read_upkeep


def read(folder: Path, text: str) -> Upkeep:
    (folder / "profile.json").write_text(text)
    return read_upkeep(folder / "profile.json")


def test_what_a_profile_says(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        '{"updates": {"adam": {"bytes_per_second": 2e9}}, "model": "x",'
        ' "forward": {"call_seconds": 1e-4, "factor": 1.0}, "backward": {"call_seconds": 2e-4},'
        ' "reading_seconds": 5e-3}',
    )
    assert found == Upkeep({"adam": 2e9}, 1e-4, 2e-4, 5e-3)


def test_the_first_stage_and_the_last_read_the_data() -> None:
    upkeep = Upkeep({}, 1e-4, 2e-4, 5e-3)
    assert [upkeep.beside(stage, 3) for stage in range(3)] == [
        pytest.approx((5.1e-3, 2e-4)),
        (1e-4, 2e-4),
        pytest.approx((5.1e-3, 2e-4)),
    ]
    assert upkeep.beside(0, 1) == pytest.approx((5.1e-3, 2e-4))


def test_how_much_passes_vary_but_for_one_that_was_stopped_meanwhile(tmp_path: Path) -> None:
    found = read(tmp_path, '{"pass_seconds": [2.0, 3.0, 60.0, 2.0, 1.0]}')
    assert found.spread == [1.0, 1.5, 1.0, 0.5]


def test_a_pass_takes_time(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"pass_seconds.0"):
        read(tmp_path, '{"pass_seconds": [0.0]}')


def test_an_older_profile_says_nothing(tmp_path: Path) -> None:
    assert read(tmp_path, '{"model": "x"}') == Upkeep({})


def test_what_is_no_rate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"updates.adam.bytes_per_second"):
        read(tmp_path, '{"updates": {"adam": {"bytes_per_second": 0}}}')
