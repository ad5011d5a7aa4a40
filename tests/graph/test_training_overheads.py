from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from profiled import profile, profile_of

from pipedream.graph.errors import UserError
from pipedream.graph.model import Graph, Node
from pipedream.graph.profile import (
    DirectionFit,
    Estimated,
    ProfiledUpdate,
    TrainingOverheads,
    Uncertainty,
    read_profile,
    read_profile_of,
    write_profile,
)

GRAPH = Graph({name: Node(name, f"Linear({name})") for name in "ab"}, (("a", "b"),))


def fitted(call_seconds: float) -> DirectionFit:
    return DirectionFit(call_seconds=call_seconds, factor=1.0, typical_error=0.0, worst_error=0.0)


def test_what_a_profile_says() -> None:
    overheads = profile(
        updates={
            "adam": ProfiledUpdate(bytes_per_second=2e9, in_place_bytes_per_second=3e9),
            "muon": ProfiledUpdate(bytes_per_second=1e9),
        },
        forward=fitted(1e-4),
        backward=fitted(2e-4),
        reading_seconds=5e-3,
    ).training_overheads
    rates = {"adam": 2e9, "muon": 1e9}
    assert overheads == TrainingOverheads(rates, 1e-4, 2e-4, 5e-3, in_place_rates={"adam": 3e9})


def test_the_first_stage_and_the_last_read_the_data() -> None:
    overheads = TrainingOverheads({}, 1e-4, 2e-4, 5e-3)
    assert [overheads.of_stage(stage, 3) for stage in range(3)] == [
        pytest.approx((5.1e-3, 2e-4)),
        (1e-4, 2e-4),
        pytest.approx((5.1e-3, 2e-4)),
    ]
    assert overheads.of_stage(0, 1) == pytest.approx((5.1e-3, 2e-4))


def test_few_passes_vary_as_they_do_but_for_one_that_was_stopped_meanwhile() -> None:
    overheads = profile(pass_seconds=(2.0, 60.0, 2.0, 1.0)).training_overheads
    assert overheads.spread == (1.0, 1.0, 0.5)
    assert overheads.uncertainty == Uncertainty()


def test_what_is_estimated_is_as_sure_as_such_estimates() -> None:
    known = Estimated(device="h100", error=0.06745, worst=0.2, peak=1e15)
    assert profile(estimated=known).training_overheads.uncertainty.estimated == pytest.approx(0.1)
    nobody = known.model_copy(update={"error": None, "worst": None})
    assert profile(estimated=nobody).training_overheads.uncertainty.estimated > 0.4


def test_an_older_profile_says_nothing() -> None:
    assert profile().training_overheads == TrainingOverheads({})


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('"pass_seconds": [0.0]', "pass_seconds.0"),
        ('"pass_seconds": [1.0, 2.0]', "pass_seconds_beside: give each worker one for each"),
        ('"updates": {"adam": {"bytes_per_second": 0}}', "updates.adam.bytes_per_second"),
    ],
)
def test_what_is_no_time_or_rate_is_refused(tmp_path: Path, text: str, field: str) -> None:
    path = tmp_path / "profile.json"
    write_profile(profile(pass_seconds_beside=((),)), path)
    before = '"pass_seconds": []' if "pass" in field else '"updates": {}'
    path.write_text(path.read_text().replace(before, text))
    with pytest.raises(UserError, match=field):
        read_profile(path)


def test_a_time_is_as_sure_as_its_quartiles_are_close() -> None:
    times = profile_of(GRAPH).node["a"].forward_seconds.model_copy(update={"lower": 1, "upper": 2})
    assert times.spread == 0.5


@pytest.mark.parametrize("changes", [{"graph_fingerprint": "other"}, {"nodes": ()}])
def test_the_profile_of_another_graph_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = tmp_path / "profile.json"
    write_profile(profile_of(GRAPH).model_copy(update=changes), path)
    with pytest.raises(UserError, match=r"profile.json: the profile of another graph"):
        read_profile_of(path, GRAPH)
