"""What a step takes: as it was measured with the schedule's copies, or as the user says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipedream.graph.profile import TrainingOverheads
from pipedream.optimizer.cli.options import Options
from pipedream.optimizer.cli.task import _update_rates

ASKED = Options(graph=Path("graph.txt"), optimizer="adam")
MEASURED = TrainingOverheads({"adam": 2e9, "muon": 1e9}, in_place_rates={"adam": 3e9})


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({}, (2e9, 3e9)),
        ({"optimizer": "muon"}, (1e9, None)),
        ({"update_rate": "5GB"}, (5e9, None)),
    ],
)
def test_measured_rates_hold_unless_the_user_gives_one(
    options: dict[str, str], rates: tuple[float, float | None]
) -> None:
    assert _update_rates(replace(ASKED, **options), MEASURED) == rates  # type: ignore[arg-type]


def test_without_a_measured_rate_all_schedules_have_the_usual_one() -> None:
    assert _update_rates(ASKED, None)[1] is None
    assert _update_rates(ASKED, None) == _update_rates(ASKED, TrainingOverheads({}))
