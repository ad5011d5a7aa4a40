from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from profiled import profile, profile_of

from pipedream.graph.errors import UserError
from pipedream.graph.model import Graph, Node
from pipedream.graph.profile import (
    DirectionFit,
    Estimated,
    PassVariation,
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


def passes(fast: float, slow: float, count: int = 4_000) -> tuple[float, ...]:
    """Seconds of passes whose logarithms vary by `fast` each, and by `slow` every 200."""
    draw = np.random.default_rng(0)
    drift = np.repeat(draw.normal(0, slow, count // 200), 200)
    drift *= slow / drift.std() if slow else 0
    return tuple(np.exp(draw.normal(0, fast, count) + drift).tolist())


@pytest.mark.parametrize(("fast", "slow"), [(0.05, 0.0), (0.05, 0.1), (0.01, 0.1)])
def test_what_changes_from_pass_to_pass_is_told_from_what_drifts(fast: float, slow: float) -> None:
    seconds = passes(fast, slow)
    variation = PassVariation.of(seconds)
    assert np.std(np.log(variation.fast)) == pytest.approx(fast, rel=0.15)
    assert variation.drift == pytest.approx(slow, rel=0.1, abs=0.015)
    assert np.mean(variation.fast) == pytest.approx(np.mean(seconds) / np.median(seconds))
    assert variation.of_median == pytest.approx(1.2533 * fast / 4_000**0.5, rel=0.15)


def test_passes_that_only_get_slower_make_nobody_wait() -> None:
    variation = PassVariation.of([1.0 + 0.001 * number for number in range(100)])
    assert max(variation.fast) / min(variation.fast) < 1.001
    assert variation.drift == pytest.approx(0.028, rel=0.05)


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
        ('"updates": {"adam": {"bytes_per_second": 0}}', "updates.adam.bytes_per_second"),
    ],
)
def test_what_is_no_time_or_rate_is_refused(tmp_path: Path, text: str, field: str) -> None:
    path = tmp_path / "profile.json"
    write_profile(profile(), path)
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
