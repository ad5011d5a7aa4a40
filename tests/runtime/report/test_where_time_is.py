"""What the stages of a run did, beside what was expected of them, by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from plans import make_plan
from played import played
from schedules import policy
from torch.distributed import HashStore

from pipedream.graph.model import Graph, Node
from pipedream.graph.plan import Plan, Predicted, StageSeconds
from pipedream.graph.timeline import Event
from pipedream.runtime.report.first_minibatches import FirstLook, RankReport, span_of
from pipedream.runtime.report.stage_seconds import (
    StagesMeasured,
    measured_stages,
    worker_seconds,
)
from pipedream.runtime.report.utilisation import measure_utilisation
from pipedream.runtime.report.where_time_is import what_is_off, where_time_is
from pipedream.runtime.run.training_segment import TrainingSegment
from pipedream.schedule.action import parse_action
from pipedream.schedule.steady_state import SteadySpan


def plan(replicas: tuple[int, int] = (1, 1)) -> Plan:
    graph = Graph({name: Node(name, "Linear()") for name in "ab"}, (("a", "b"),))
    return make_plan(graph, [["a"], ["b"]], replicas)


def stage(compute: float, waiting: float = 0.0, exchange: float = 0.0) -> StageSeconds:
    return StageSeconds(compute=compute, waiting=waiting, exchange=exchange)


def expecting(*stages: StageSeconds) -> Predicted:
    """10 ms, of two stages; nine of ten runs take 9 to 11."""
    figures: dict[str, Any] = {
        "expected_seconds_per_minibatch": 0.010,
        "expected_interval": (0.009, 0.011),
        "expected_stages": stages or (stage(0.009, 0.001), stage(0.008, 0.002)),
    }
    return plan().predicted.model_copy(update=figures)


def measured(seconds: float, *stages: StageSeconds, **waits: float) -> StagesMeasured:
    """`w01`: stage 0 waits for stage 1."""
    return StagesMeasured(seconds, stages, {(int(k[1]), int(k[2])): s for k, s in waits.items()})


def events(text: str) -> list[Event]:
    found = []
    for part in text.split(", "):
        action, _, span = part.partition(" ")
        begin, end = map(float, span.split("-"))
        found.append(Event(parse_action(action), begin, end))
    return found


ONE = events(
    "0F0 0-1, 0F1 1-2, 0B0 2-4, 0U0@1 4-5, 0SA1>1 5-5.5, 0RG1<1 5.5-7, 0B1 7-9, 0U1@2 9-10, "
    "0RG2<1 10-12, 0AR2 12-13, 0B2 13-15"
)


def test_a_worker_is_looked_at_from_one_backward_pass_to_another() -> None:
    """From 4, when minibatch 0 had gone backward, to 15, when 2 had: two of the pipeline's."""
    found = worker_seconds(ONE, (0, 0), 1, SteadySpan(3, 1, 3))
    assert found is not None
    assert found.whole == pytest.approx(11 / 2)
    assert found.compute == pytest.approx((1 + 2 + 1 + 2) / 2)
    assert found.exchange == pytest.approx((0.5 + 1) / 2)
    assert found.waits == {1: pytest.approx((1.5 + 2) / 2)}
    assert worker_seconds(ONE, (0, 0), 1, SteadySpan(4, 1, 4)) is None
    assert worker_seconds(ONE, (0, 0), 1, SteadySpan(3, 0, 3)) is None
    assert worker_seconds(ONE, (1, 0), 1, SteadySpan(3, 1, 3)) is None


@pytest.mark.parametrize("replicas", [(1, 1), (2, 1), (3, 1), (2, 2)])
def test_what_is_known_of_a_schedule_adds_up(replicas: tuple[int, int]) -> None:
    """The time of a minibatch is that of the run as a whole; and nobody does more than there is."""
    span = SteadySpan(60, 12, 48)
    timeline = played(replicas, 60)
    found = measured_stages(timeline, span, plan(replicas))
    assert found is not None
    whole = measure_utilisation([timeline], span).seconds_per_minibatch
    assert found.seconds == pytest.approx(whole, rel=0.1)
    for own in found.stages:
        assert 0 < own.compute <= found.seconds * (1 + 1e-9)
        assert own.compute + own.waiting + own.exchange <= found.seconds * (1 + 1e-6)


def test_a_run_among_nine_of_ten_needs_no_reason() -> None:
    said = expecting()
    assert what_is_off(said, measured(0.0108, stage(0.0107), stage(0.008, 0.0028))) == []
    assert what_is_off(said, measured(0.0112, stage(0.0107), stage(0.008, 0.0028))) != []
    older = said.model_copy(update={"expected_stages": None})
    assert what_is_off(older, measured(0.02, stage(0.02), stage(0.008))) == []


def test_the_stage_that_computes_longer_is_named_and_not_the_one_that_waits_for_it() -> None:
    found = measured(0.014, stage(0.009, 0.005), stage(0.0136), w01=0.005)
    assert what_is_off(expecting(), found) == [
        "slower than expected: stage 1 computes for 13.6 ms in place of 8 ms"
    ]


def test_sums_that_take_longer_are_named() -> None:
    found = measured(0.014, stage(0.009, 0.0, 0.004), stage(0.008, 0.006), w10=0.006)
    assert what_is_off(expecting(), found) == [
        "slower than expected: stage 0 exchanges gradients and messages for 4 ms in place of 0 us"
    ]


def test_a_link_is_named_where_both_of_its_ends_compute_as_expected() -> None:
    found = measured(0.014, stage(0.009, 0.005), stage(0.008, 0.006), w01=0.005, w10=0.006)
    (line,) = what_is_off(expecting(), found)
    assert "stage 0 waits for 5 ms in place of 1 ms, most of it for stage 1: the link" in line or (
        "stage 1 waits for 6 ms in place of 2 ms, most of it for stage 0: the link" in line
    )


def test_a_run_may_be_faster_too() -> None:
    found = measured(0.006, stage(0.005, 0.001), stage(0.0055, 0.0005))
    assert what_is_off(expecting(), found) == [
        "faster than expected: stage 0 computes for 5 ms in place of 9 ms"
    ]


def test_each_stage_has_a_row() -> None:
    rows = where_time_is(expecting(), measured(0.01, stage(0.009, 0.001), stage(0.008, 0.002)))
    assert [row.split() for row in rows] == [
        ["stage", "compute", "waiting", "exchange"],
        ["0", "9", "ms", "(9", "ms)", "1", "ms", "(1", "ms)", "0", "us", "(0", "us)"],
        ["1", "8", "ms", "(8", "ms)", "2", "ms", "(2", "ms)", "0", "us", "(0", "us)"],
    ]
    (_, alone) = where_time_is(None, measured(0.01, stage(0.009)))
    assert alone.split() == ["0", "9", "ms", "0", "us", "0", "us"]


def job(schedule: Any, replicas: tuple[int, ...], microbatches: int = 1) -> Any:
    return SimpleNamespace(policy=policy(schedule, replicas, microbatches))


def test_a_hundred_minibatches_with_a_full_pipeline_are_looked_at() -> None:
    stashing, flush = job("weight-stashing", (1, 1)), job("flush", (1, 1), 8)
    assert span_of(stashing, TrainingSegment(0, 2_000), 2_000, 2_000) == SteadySpan(2_000, 2, 102)
    assert span_of(stashing, TrainingSegment(50, 2_000), 2_000, 9_999) == SteadySpan(2_000, 52, 152)
    assert span_of(flush, TrainingSegment(0, 2_000), 2_000, 2_000) == SteadySpan(2_000, 8, 112)
    # Of a short run a tenth, but ten on each rank.
    assert span_of(stashing, TrainingSegment(0, 300), 300, 300) == SteadySpan(300, 2, 32)
    assert span_of(stashing, TrainingSegment(0, 60), 60, 60) == SteadySpan(60, 2, 12)
    assert span_of(job("flush", (3, 1), 6), TrainingSegment(0, 90), 90, 90) == SteadySpan(90, 6, 36)
    # Not while the pipeline drains, and not the last minibatch, if it is smaller.
    assert span_of(stashing, TrainingSegment(0, 20), 200, 2_000) == SteadySpan(20, 2, 18)
    assert span_of(flush, TrainingSegment(0, 33), 32, 900) == SteadySpan(33, 8, 32)
    assert span_of(stashing, TrainingSegment(0, 12), 200, 2_000) is None


def test_rank_0_hears_of_all_ranks_once() -> None:
    timeline, store, span = played((2, 1), 60), HashStore(), SteadySpan(60, 12, 48)
    look = FirstLook(store, range(3), span)
    workers = {0: [(0, 0)], 1: [(0, 1)], 2: [(1, 0)]}
    reports = {rank: RankReport(store, rank, own, (2, 1), span) for rank, own in workers.items()}
    for rank, report in reports.items():
        assert look.received() is None
        report.look([e for e in timeline[rank] if e.action.minibatch < 40])
        assert not report.sent
        report.look(timeline[rank])
        assert report.sent
    found = look.received()
    assert found is not None
    assert look.received() is None
    assert found.count == 36
    assert found.stages == measured_stages(timeline, span, plan((2, 1)))
    assert [(r.rank, r.stage, r.replica, r.minibatches) for r in found.ranks] == [
        (0, 0, 0, 18),
        (1, 0, 1, 18),
        (2, 1, 0, 36),
    ]


def test_a_rank_that_ended_too_early_says_so() -> None:
    store, span = HashStore(), SteadySpan(60, 12, 48)
    report = RankReport(store, 0, [(0, 0)], (1,), span)
    report.look(ONE)
    assert not report.sent
    report.look(ONE, ended=True)
    assert report.sent
    assert FirstLook(store, [0], span).received() is None
