"""Expected and measured: the difference, where it lies, and what to do about it."""

from __future__ import annotations

from pathlib import Path

import pytest
from plans import make_plan

from pipedream.graph.cluster import Cluster, Link
from pipedream.graph.measured_run import MeasuredRank, MeasuredRun
from pipedream.graph.model import Graph, Node
from pipedream.graph.plan import Plan, Simulated
from pipedream.graph.profile import Quartiles
from pipedream.runtime.report.expectation import advice, busy_shares, compare, figures

RUN = Path("runs/run")


def spread(seconds: float) -> Quartiles:
    return Quartiles(median=seconds, lower=seconds, upper=seconds)


def plan(measured_links: bool = False) -> Plan:
    """Two stages that compute 8 and 9 ms of the 10 expected, updates included."""
    nodes = {name: Node(id=name, description="Linear()") for name in "ab"}
    made = make_plan(Graph(nodes, (("a", "b"),)), [["a"], ["b"]], [1, 1])
    seconds = (0.0076, 0.00855)
    stages = [
        stage.model_copy(update={"compute_seconds": each})
        for stage, each in zip(made.stages, seconds, strict=True)
    ]
    figures = {
        "expected_seconds_per_minibatch": 0.01,
        "simulated": Simulated(seconds_per_minibatch=0.01, bubble=0.15),
    }
    link = Link(points=((1000.0, 0.1), (2000.0, 0.2)))
    cluster = Cluster(machines=(2,), bandwidth=(1e9,), send=(link,) if measured_links else ())
    predicted = made.predicted.model_copy(update=figures)
    changed = {"stages": tuple(stages), "predicted": predicted, "cluster": cluster}
    return made.model_copy(update=changed)


def run(
    of: Plan, seconds: float, computed: tuple[float, float], device: str = "cpu"
) -> MeasuredRun:
    ranks = [
        MeasuredRank(
            rank=stage,
            stage=stage,
            replica=0,
            minibatches=9,
            forward=spread(busy / 3),
            backward=spread(busy / 3),
            updates=9,
            update=spread(busy / 3),
        )
        for stage, busy in enumerate(computed)
    ]
    return MeasuredRun(
        device=device,
        threads=1,
        batch_size=8,
        schedule=of.schedule,
        seconds_per_minibatch=seconds,
        ranks=tuple(ranks),
        plan=of,
    )


def test_the_planned_shares_are_of_the_expected_time_with_updates() -> None:
    """They were of the closed form once, without updates, and above what any run could do."""
    assert busy_shares(plan()) == pytest.approx({0: 0.8, 1: 0.9})


def test_passes_that_took_longer() -> None:
    taken = run(plan(), 0.0142, (0.011, 0.0125))
    found = compare(taken)
    assert found is not None
    assert figures(found) == [
        "  stage 1 computed  12.5 ms, expected 9 ms (+3.5 ms)",
        "  messages, waiting 1.7 ms, expected 1 ms (+700 us)",
    ]
    said = " ".join(advice(found, taken, RUN))
    assert "Passes took longer than in the profile" in said
    assert "pd-profile --workers 2" in said
    assert "--calibrate runs/run" in said


def test_passes_of_gpus_that_took_longer() -> None:
    """Runs on GPUs are compared like others; pd-profile --workers is about the cores of a CPU."""
    taken = run(plan(), 0.0142, (0.011, 0.0125), device="cuda")
    found = compare(taken)
    assert found == compare(run(plan(), 0.0142, (0.011, 0.0125)))
    assert found is not None
    said = " ".join(advice(found, taken, RUN))
    assert "Passes took longer than in the profile: the GPU" in said
    assert "--workers" not in said
    assert "--calibrate runs/run" in said


def test_passes_on_meshes_that_took_longer() -> None:
    """They have messages within them, so no run of them corrects a profile; of the time of two
    teams of two devices each has half.
    """
    alone, stages = plan(), []
    for stage in alone.stages:
        ranks = (2 * stage.stage, 2 * stage.stage + 1)
        stages.append(stage.model_copy(update={"mesh": (2,), "ranks": ranks}))
    cluster = Cluster(machines=(4,), bandwidth=(1e9,))
    teams = alone.model_copy(update={"stages": tuple(stages), "cluster": cluster})
    assert busy_shares(teams) == pytest.approx({0: 0.8, 1: 0.8, 2: 0.9, 3: 0.9})
    alone_run = run(alone, 0.0142, (0.011, 0.0125))
    found = compare(alone_run)
    assert found is not None
    said = " ".join(advice(found, alone_run.model_copy(update={"plan": teams}), RUN))
    assert "--calibrate" not in said
    assert "pd-profile --shards" in said


def test_passes_that_took_less() -> None:
    """It said "with other processes at work (pd-profile --workers 2)" of a profile made so."""
    taken = run(plan(), 0.006, (0.004, 0.005))
    found = compare(taken)
    assert found is not None
    said = " ".join(advice(found, taken, RUN))
    assert "Passes took less than in the profile" in said
    assert "--workers" not in said
    assert "--calibrate runs/run" in said


@pytest.mark.parametrize(
    ("measured_links", "words"), [(False, "--cluster auto"), (True, "repeat pd-profile --network")]
)
def test_messages_that_took_longer(measured_links: bool, words: str) -> None:
    taken = run(plan(measured_links), 0.0142, (0.008, 0.0091))
    found = compare(taken)
    assert found is not None
    assert words in " ".join(advice(found, taken, RUN))


def test_a_run_as_expected_needs_no_words() -> None:
    taken = run(plan(), 0.0104, (0.008, 0.009))
    found = compare(taken)
    assert found is not None
    assert figures(found) == advice(found, taken, RUN) == []


def test_nothing_is_compared_with_what_was_not_planned() -> None:
    other = run(plan(), 0.02, (0.01, 0.01)).model_copy(update={"schedule": "flush"})
    assert compare(other) is None
    of_16 = plan().model_copy(update={"batch_size": 16})
    assert compare(run(of_16, 0.02, (0.01, 0.01))) is None
