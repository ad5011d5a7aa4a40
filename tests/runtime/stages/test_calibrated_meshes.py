"""What a run on a mesh says of the times of layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from commands import typed
from found_plans import planned, profiled
from measured_runs import measured

from pipedream.graph.measured_run import write_measured
from pipedream.graph.plan import Plan
from pipedream.graph.profile import Profile
from pipedream.optimizer.calibrate.runs import CalibrationRun, DividedWork, calibrated
from pipedream.optimizer.cli.command import main, typed_options
from pipedream.optimizer.cli.task import Task, make_task
from pipedream.optimizer.cuts.groups import classes_of, fusion_groups
from pipedream.optimizer.cuts.planning_graph import PlanningGraph
from pipedream.optimizer.sharding.planned_views import device_work, planned_views, priced_again


class Meshed(NamedTuple):
    """A plan of two stages on meshes, the task that it came of, and its work as profiled."""

    plan: Plan
    task: Task
    work: DividedWork

    def passes(self, times: float) -> list[list[float]]:
        """Milliseconds of each stage where its layers take so many times as long as profiled, and
        messages what they should.
        """
        found = []
        for stage in self.plan.stages:
            nodes = [self.task.profiled.nodes[name] for name in stage.nodes]
            work = self.work
            ways = ((work.seconds(nodes, way), work.waited(nodes, way)) for way in (False, True))
            found.append([1e3 * (times * (taken - waited) + waited) for taken, waited in ways])
        return found

    @property
    def profile(self) -> Profile:
        assert self.task.profile is not None
        return self.task.profile


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a profile and the plan."""
    return tmp_path_factory.mktemp("profiled")


@pytest.fixture(scope="module")
def meshed(folder: Path) -> Meshed:
    profiled(folder, "Perceptron", dtype="float32")
    # By measured times of such a small model one stage may be as good.
    plan = planned(folder, "--machines", "4", "--mesh", "2", "--split", "node4")
    assert len(plan.stages) == 2
    words = [str(folder / "graph.txt"), "--machines", "4", "--bandwidth", "1TB", "--straight"]
    words += ["--schedule", "flush", "--microbatches", "2", "--mesh", "2"]
    task = make_task(typed_options(main.make_context("pd-optimize", words)))
    assert task.operators is not None
    assert task.profile is not None
    views, division = planned_views(plan, task.of_devices, task.operators, task.profile)
    again = priced_again(plan, views, division).plan.predicted
    assert again.seconds_per_minibatch == pytest.approx(plan.predicted.seconds_per_minibatch)
    return Meshed(plan, task, DividedWork(*device_work(views, division)))


def test_layers_are_corrected_by_the_parts_that_devices_work(
    tmp_path: Path, meshed: Meshed
) -> None:
    """Messages are no part of it. With them, or with a device's part of a layer taken for all of
    it, the layers would not be found to take thrice as long.
    """
    assert min(meshed.work.shares.values()) < 0.75
    assert sum(meshed.work.messages.values()) > 0
    nodes = meshed.task.profiled.nodes
    # As long as the passes: of what is left, a tenth of a pass at least is taken for work.
    messages = {
        (name, backward): nodes[name].backward_seconds if backward else nodes[name].forward_seconds
        for name, backward in meshed.work.messages
    }
    meshed = meshed._replace(work=replace(meshed.work, messages=messages))
    run, before = CalibrationRun(tmp_path, measured(meshed.plan, meshed.passes(3.0))), meshed.task
    found = calibrated(before.profiled, [run], None, None, [meshed.work])
    for name, node in before.profiled.nodes.items():
        assert found.nodes[name].forward_seconds == pytest.approx(3 * node.forward_seconds)
        assert found.nodes[name].backward_seconds == pytest.approx(3 * node.backward_seconds)


def test_the_plan_is_judged_by_its_run(folder: Path, meshed: Meshed) -> None:
    (folder / "run").mkdir()
    times, batch = meshed.passes(3.0), meshed.profile.batch_size
    run = measured(meshed.plan, times, batch_size=batch, schedule="flush")
    write_measured(run, folder / "run" / "measured.json")
    words = ["pd-optimize", "graph.txt", "--calibrate", "run", "-o", "again"]
    done = typed(folder, words)
    assert done.code == 0, done.error
    assert "The plan of run" in done.out
    assert "predicted now" in done.out


def test_a_run_may_have_cut_what_is_a_group_now(folder: Path, meshed: Meshed) -> None:
    """Its stages were taken for those of whole groups."""
    graph = meshed.task.profiled
    groups = fusion_groups(PlanningGraph.of(graph), classes_of(graph, meshed.task.operators))
    inner = next(own[-1] for own in groups if len(own) > 1)
    plan = planned(folder, "--machines", "4", "--mesh", "2", "--split", inner, name="inside")
    run = measured(plan, [(3, 6), (6, 3)], batch_size=meshed.profile.batch_size, schedule="flush")
    (folder / "cut").mkdir()
    write_measured(run, folder / "cut" / "measured.json")
    words = [str(folder / "graph.txt"), "--calibrate", str(folder / "cut")]
    words += ["--schedule", "flush", "--microbatches", "2"]

    def task(*more: str) -> Task:
        return make_task(typed_options(main.make_context("pd-optimize", [*words, *more])))

    plain, grouped = task(), task("--group", "fusion")
    assert len(grouped.of_devices.planning) < len(plain.of_devices.planning)
    assert grouped.of_devices.graph == plain.of_devices.graph
    prices = [each.calibration.priced(plan, each.of_devices) for each in (plain, grouped)]
    assert prices[0] == prices[1]
