"""What a stretch takes beyond the sum over its nodes: known laws come out again."""

from __future__ import annotations

import random

import pytest

from pipedream.profiler.stretches.division import Compared, fit_stretches


def law(call: float, factor: float, *summed: float) -> list[Compared]:
    return [Compared(seconds, call + factor * seconds) for seconds in summed]


def test_a_known_call_and_factor_come_out() -> None:
    fit = fit_stretches(law(2e-4, 1.04, 1e-3, 2e-3, 2.5e-3, 5e-3))
    assert fit.call_seconds == pytest.approx(2e-4, rel=0.05)
    assert fit.factor == pytest.approx(1.04, rel=0.01)
    assert fit.worst_error < 0.005


def test_in_long_passes_noise_does_not_pass_for_a_call() -> None:
    noise = random.Random(0)
    pairs = [
        Compared(s, s * noise.gauss(1.02, 0.03)) for s in (1.0, 0.5, 0.5, 0.25, 0.3, 0.2, 0.25)
    ]
    fit = fit_stretches(pairs)
    assert fit.call_seconds < 1e-3
    assert fit.factor == pytest.approx(1.02, abs=0.03)


def test_a_call_takes_no_less_than_nothing() -> None:
    fit = fit_stretches(law(-2e-4, 1.0, 1e-3, 2e-3, 4e-3))
    assert fit.call_seconds == 0
    assert 0.8 < fit.factor < 1


def test_nothing_measured_changes_nothing() -> None:
    fit = fit_stretches([Compared(0.0, 0.0)])
    assert (fit.call_seconds, fit.factor) == (0.0, pytest.approx(1.0))
    assert (fit.typical_error, fit.worst_error) == (0.0, 0.0)


def test_what_is_left_is_told() -> None:
    pairs = [Compared(1.0, 1.02), Compared(2.0, 1.9), Compared(3.0, 3.03)]
    fit = fit_stretches(pairs)
    off = sorted(abs((fit.call_seconds + fit.factor * p.summed) / p.measured - 1) for p in pairs)
    assert (fit.typical_error, fit.worst_error) == pytest.approx((off[1], off[2]))
    assert 0.001 < fit.typical_error < fit.worst_error < 0.06


def test_a_stretch_that_differs_from_repeat_to_repeat_counts_less() -> None:
    steady = [Compared.median([Compared(s, 1.05 * s)] * 3) for s in (1.0, 0.5, 0.5, 0.25)]
    shaken = [Compared(1.0, 0.4), Compared(1.0, 0.5), Compared(1.0, 2.0)]
    assert Compared.median(shaken).measured == 0.5
    assert Compared.median(shaken).off > 0.3
    assert fit_stretches([*steady, Compared.median(shaken)]).factor == pytest.approx(1.05, abs=0.01)
    assert fit_stretches([*steady, Compared(1.0, 0.5)]).factor < 1


def test_a_machine_fast_and_slow_by_turns_changes_no_factor() -> None:
    """The median sum is of a slow moment, the median measurement of a fast one: their ratio was
    two thirds, though four repeats of five had them alike.
    """
    each = [Compared(1, 1), Compared(1, 1), Compared(1.5, 1), Compared(1.5, 1.5), Compared(2, 2)]
    assert Compared.median(each) == Compared(1.5, 1.5, 0.0)


def test_what_takes_no_time_alone_may_still_take_some_together() -> None:
    assert Compared.median([Compared(0, 1e-5)] * 2) == Compared(0, 1e-5)
