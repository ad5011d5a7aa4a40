"""How passes vary, of one worker and between several."""

from __future__ import annotations

import math
from statistics import fmean

import numpy as np
import pytest

from pipedream.graph.variation import PassVariation, in_all, levels


def passes(fast: float, slow: float, count: int = 4_000, seed: int = 0) -> tuple[float, ...]:
    """Seconds of passes whose logarithms vary by `fast` each, and by `slow` every 200."""
    draw = np.random.default_rng(seed)
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


@pytest.mark.parametrize("common", [0.0, 0.1])
@pytest.mark.parametrize("own", [0.0, 0.08])
def test_the_drift_of_one_worker_is_told_from_that_of_the_machine(
    common: float, own: float
) -> None:
    """All drift was taken for the machine's, and nobody waited. On a virtual machine each of two
    cores drifted by 10 % by itself (a correlation of 0.05): pipelines and meshes of two took 5 to
    15 % longer than expected.
    """
    shared = np.array(passes(0.0, common, seed=9))
    one, two, three = (shared * passes(0.04, own, seed=seed) for seed in range(3))
    variation = PassVariation.of(one.tolist(), [two.tolist(), three.tolist()])
    assert variation.own == pytest.approx(own, abs=0.01)
    assert variation.drift == pytest.approx(math.hypot(common, own), abs=0.02)
    assert PassVariation.of(one.tolist()).own == 0.0


def test_a_pass_that_was_interrupted_in_any_worker_says_nothing_of_drift() -> None:
    one, two = list(passes(0.02, 0.0, 400)), list(passes(0.02, 0.0, 400, seed=1))
    one[100], two[200:204] = 9.0, [7.0] * 4
    assert PassVariation.of(one, [two]).own < 0.01
    assert PassVariation.of([1.0, 1.0, 1.0, 9.0, 9.0], [[1.0, 9.0, 1.0, 1.0, 1.0]]).own == 0.0


def test_levels_are_as_good_as_normal() -> None:
    nine = levels(0.1, 9)
    assert fmean(nine) == pytest.approx(1.0)
    assert np.std(np.log(nine)) == pytest.approx(0.1)
    assert levels(0.1, 1) == (1.0,)
    assert levels(0.0, 3) == (1.0, 1.0, 1.0)


def test_times_with_the_drift_of_a_worker() -> None:
    spread = (0.9, 1.0, 1.1)
    assert in_all(spread, 0.0) == spread
    assert in_all((), 0.1) == ()
    assert fmean(in_all(spread, 0.1)) == pytest.approx(1.0)
    apart = math.hypot(np.std(np.log(spread)), 0.1)
    assert np.std(np.log(in_all(spread, 0.1))) == pytest.approx(apart)
