"""From what runs measured to a corrected graph and a new plan; and every mistake in one line."""

import json
import shutil
from dataclasses import replace

import click
import pytest
from measured_runs import measured, spread
from plans import cut, make_plan
from profiled import profile_of

from pipedream.graph.cluster import Cluster, DeviceType
from pipedream.graph.measured_run import read_measured, write_measured
from pipedream.graph.model import format_graph, read_graph
from pipedream.graph.plan import PlanningOptions, StageMemory
from pipedream.graph.profile import TrainingOverheads, write_profile
from pipedream.optimizer.calibrate.price_plan import Price, price_plan
from pipedream.optimizer.calibrate.runs import CalibrationRun, calibrated
from pipedream.optimizer.calibrate.verdict import Verdict
from pipedream.optimizer.cli.command import main, typed_options
from pipedream.optimizer.cli.task import make_task
from pipedream.optimizer.cost.models import PaperCost
from pipedream.optimizer.cost.stages import Rules
from pipedream.optimizer.search.planner import optimize
from pipedream.optimizer.search.request import Request

TWO = Cluster(machines=(2,), bandwidth=(1e9,))
STRAIGHT = Rules(straight=True)


@pytest.fixture
def chain(make_graph):
    """Eight nodes of a millisecond each, forward alone."""
    return make_graph(
        "a b c d e f g h", "a-b b-c c-d d-e e-f f-g g-h", **dict.fromkeys("abcdefgh", (1, 8, 1000))
    )


@pytest.fixture
def plan(chain):
    return optimize(Request(chain, TWO, PaperCost(), rules=STRAIGHT, optimizer="sgd")).plan


def forward(graph, names):
    return sum(graph.nodes[name].forward_seconds for name in names)


def test_a_stage_twice_as_slow_moves_the_cut(chain, plan, tmp_path):
    run = CalibrationRun(tmp_path, measured(plan, [(8, 0), (4, 0)]))
    found = calibrated(chain, [run], None)
    assert found.fingerprint == chain.fingerprint
    assert forward(found, "abcd") == pytest.approx(8e-3)
    assert forward(found, "efgh") == pytest.approx(4e-3)
    better = optimize(Request(found, TWO, PaperCost(), rules=STRAIGHT, optimizer="sgd")).plan
    assert better.stages[0].nodes == ("a", "b", "c")
    now = price_plan(plan, Request(found, TWO, PaperCost()))
    assert now.per_minibatch == pytest.approx(8e-3)
    verdict = Verdict(run, now, better)
    assert verdict.gain == pytest.approx(8 / 6 - 1)
    assert verdict.words.startswith(
        f"The best plan now is 33.3% faster than the plan of {tmp_path}: 6 ms in place of 8 ms per"
    )


def test_gaps_of_all_ranks_are_compared_with_those_planned(plan, tmp_path):
    """Planned are 70 MB in stage 0 and 30 in stage 1, beside 300 and 50 MB of tensors."""
    sizes = dict.fromkeys(StageMemory.model_fields, 0.0)
    large = {"parameters": 1e8, "activations": 1.5e8, "inputs": 5e7, "allocator": 7e7}
    small = {"activations": 5e7, "allocator": 3e7}
    held = [
        stage.model_copy(update={"memory": StageMemory(**sizes | memory)})
        for stage, memory in zip(plan.stages, (large, small), strict=True)
    ]
    run = measured(plan.model_copy(update={"stages": tuple(held)}), [(8, 0), (4, 0)])

    def gaps(*peaks, **changes):
        ranks = [
            rank.model_copy(update={"peak_memory_bytes": peak})
            for rank, peak in zip(run.ranks, peaks, strict=True)
        ]
        changed = run.model_copy(update={"ranks": tuple(ranks), **changes})
        return CalibrationRun(tmp_path, changed).gaps

    assert gaps(4.2e8, 8e7) == pytest.approx(1.5)
    assert gaps(2.5e8, 5e7) == 0
    assert gaps(4.2e8, 8e7, device="cuda") is None
    assert gaps(None, None) is None


def test_forward_and_backward_are_corrected_apart(chain, plan, tmp_path):
    with_backward = chain.with_nodes(
        replace(node, backward_seconds=2e-3) for node in chain.nodes.values()
    )
    run = CalibrationRun(tmp_path, measured(plan, [(4, 16), (6, 4)]))
    found = calibrated(with_backward, [run], None)
    assert [found.nodes[n].forward_seconds for n in "ae"] == pytest.approx([1e-3, 1.5e-3])
    assert [found.nodes[n].backward_seconds for n in "ae"] == pytest.approx([4e-3, 1e-3])


def test_a_forward_pass_done_again_is_no_backward_pass(chain, plan, tmp_path):
    stage = plan.stages[0].model_copy(update={"recompute": True})
    again = plan.model_copy(update={"stages": (stage, plan.stages[1])})
    run = CalibrationRun(tmp_path, measured(again, [(4, 12), (4, 8)]))
    assert [p[0].median for p in run.passes(0)] == pytest.approx([4e-3, 8e-3])
    assert [p[0].median for p in run.passes(1)] == pytest.approx([4e-3, 8e-3])


def test_a_call_longer_than_the_pass_does_not_leave_the_stage_as_it_was(chain, plan, tmp_path):
    """The profile had a call of 1 ms, from two noisy repeats; the stage took half of that. What was
    left of it was nothing, from which nothing was learned: it kept a time that was far too long.
    """
    run = CalibrationRun(tmp_path, measured(plan, [(8, 0), (0.5, 0)]))
    found = calibrated(chain, [run], None, TrainingOverheads({}, call_forward=1e-3))
    assert forward(found, "abcd") == pytest.approx(7e-3)
    assert forward(found, "efgh") == pytest.approx(0.05e-3)


def test_a_slow_device_is_no_slow_node(chain, tmp_path):
    """Half as fast by the cluster file: what took it 8 ms takes the profiled device 4."""
    kinds = {"kinds": (DeviceType(name="old", speed=0.5),), "machine_kinds": ("old", "old")}
    cluster = Cluster(machines=(2,), bandwidth=(1e9,), **kinds)
    plan = optimize(Request(chain, cluster, PaperCost(), rules=STRAIGHT, optimizer="sgd")).plan
    run = CalibrationRun(tmp_path, measured(plan, [(8, 0), (8, 0)], update=1))
    found = calibrated(chain, [run], None)
    assert forward(found, "abcdefgh") == pytest.approx(8e-3)
    assert run.update_rate == pytest.approx(8000 / 1e-3)


def test_replicas_are_averaged(chain, tmp_path):
    plan = optimize(Request(chain, TWO, PaperCost(), optimizer="sgd")).plan
    assert plan.replicas == (2,)
    run = measured(plan, [(8, 0)])
    slow = run.ranks[1].model_copy(update={"forward": spread(24)})
    run = run.model_copy(update={"ranks": (run.ranks[0], slow)})
    assert forward(
        calibrated(chain, [CalibrationRun(tmp_path, run)], None), "abcdefgh"
    ) == pytest.approx(16e-3)


def test_the_stage_that_computes_longest(chain):
    """For each minibatch of the pipeline: two replicas share them, and each makes its updates."""
    straight = make_plan(chain, cut(chain, 2), (1, 1))
    assert measured(straight, [(4, 3), (5, 1)], update=2).slowest == (0, pytest.approx(9e-3))
    shared = make_plan(chain, cut(chain, 2), (2, 1))
    assert measured(shared, [(4, 3), (5, 1)], update=2).slowest == (1, pytest.approx(8e-3))


def test_the_plan_of_the_run_may_stay_or_be_as_good(chain, plan, tmp_path):
    run = CalibrationRun(tmp_path, measured(plan, [(4, 0), (4, 0)]))
    assert (
        Verdict(run, Price.recorded_in(plan), plan).words
        == f"The plan of {tmp_path} stays the best."
    )
    other = optimize(Request(chain, TWO, PaperCost(), optimizer="sgd")).plan
    assert "There is no need to change" in Verdict(run, Price.recorded_in(other), other).words
    slower = Verdict(run, Price(1e-3), other).words
    assert (
        slower == f"The plan of {tmp_path} is faster than the best that was asked for now: 4 ms"
        " in place of 1 ms per minibatch."
    )


def test_another_mesh_is_another_plan(chain, plan, tmp_path):
    run = CalibrationRun(tmp_path, measured(plan, [(4, 0), (4, 0)]))
    stages = tuple(stage.model_copy(update={"mesh": (1,)}) for stage in plan.stages)
    other = plan.model_copy(update={"stages": stages})
    assert not Verdict(run, Price.recorded_in(plan), other).stays
    assert Verdict(run, Price.recorded_in(plan), plan).stays


# As typed ----------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, chain, plan):
    """graph.txt, and a run whose first stage took twice as long as it was profiled."""
    (tmp_path / "graph.txt").write_text(format_graph(chain))
    (tmp_path / "run").mkdir()
    asked = PlanningOptions(straight=True, memory="1GB", update_rate="1GB")
    kept = plan.model_copy(update={"asked": asked})
    write_measured(measured(kept, [(8, 0), (4, 0)], update=1), tmp_path / "run/measured.json")
    return tmp_path


def typed(*words):
    context = click.Context(main)
    main.parse_args(context, [str(word) for word in words])
    return typed_options(context)


def ended(capsys, *words):
    """The exit code of pd-optimize, what it printed, and what it complained of."""
    with pytest.raises(SystemExit) as stop:
        main.main([str(word) for word in words])
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err


def test_cluster_and_options_are_those_of_the_run(folder):
    task = make_task(typed(folder / "graph.txt", "--calibrate", folder / "run"))
    request = task.request
    assert request.cluster == TWO
    assert (request.rules, request.memory, request.optimizer) == (STRAIGHT, 1e9, "sgd")
    assert request.update_rate == pytest.approx(8000 / 2e-3, rel=1e-3)  # two steps of a millisecond
    assert forward(request.graph, "abcd") == pytest.approx(8e-3)
    assert forward(task.profiled, "abcd") == pytest.approx(4e-3)


def test_what_is_typed_goes_first(folder):
    words = ("--machines", "3", "--bandwidth", "2GB", "--update-rate", "3GB", "--memory", "2GB")
    request = make_task(typed(folder / "graph.txt", "--calibrate", folder / "run", *words)).request
    assert request.cluster == Cluster(machines=(3,), bandwidth=(2e9,))
    assert (request.update_rate, request.memory) == (3e9, 2e9)
    fewer = typed(folder / "graph.txt", "--calibrate", folder / "run", "--workers", "1")
    assert make_task(fewer).request.cluster.machines == (1,)


def test_the_new_plan_is_written_and_judged(folder, capsys):
    new = folder / "new"
    code, out, err = ended(capsys, folder / "graph.txt", "--calibrate", folder / "run", "-o", new)
    assert (code, err) == (0, "")
    assert "33.3% faster" in out
    assert "passes and updates of stage 0" in out
    corrected = read_graph(new / "graph.txt")
    assert forward(corrected, "abc") == pytest.approx(6e-3)
    assert {corrected.nodes[name].stage for name in "abc"} == {0}
    plan = json.loads((new / "plan.json").read_text())
    assert plan["asked"]["straight"]
    assert max(len(line) for line in out.splitlines() if str(folder) not in line) <= 200


def test_a_later_run_and_an_earlier_one_are_weighed_together(folder, chain, plan, capsys):
    """The second cut one node further: what lies between is told apart."""
    stages = [
        stage.model_copy(update={"nodes": tuple(nodes)})
        for stage, nodes in zip(plan.stages, ("abcde", "fgh"), strict=True)
    ]
    later = plan.model_copy(update={"stages": tuple(stages)})
    (folder / "later").mkdir()
    write_measured(measured(later, [(9, 0), (3, 0)]), folder / "later/measured.json")
    runs = ("--calibrate", folder / "run", "--calibrate", folder / "later")
    graph = make_task(typed(folder / "graph.txt", *runs)).request.graph
    assert forward(graph, "abcd") == pytest.approx(8e-3, rel=0.01)
    assert forward(graph, "e") == pytest.approx(1e-3, rel=0.1)
    assert forward(graph, "fgh") == pytest.approx(3e-3, rel=0.01)


def another_graph(folder):
    text = (folder / "graph.txt").read_text().replace("Linear(c)", "Conv2d(c)")
    (folder / "graph.txt").write_text(text)


def another_batch_size(folder):
    graph = read_graph(folder / "graph.txt")
    write_profile(profile_of(graph, batch_size=16), folder / "profile.json")


def another_device(folder):
    change(folder, device="cuda")
    profiled_on("cpu", folder)


def profiled_on(device, folder):
    profile = profile_of(read_graph(folder / "graph.txt"), batch_size=8)
    machine = profile.machine.model_copy(update={"device": device})
    path = folder / "profile.json"
    write_profile(profile.model_copy(update={"machine": machine}), path)


def change(folder, **fields):
    path = folder / "run/measured.json"
    write_measured(read_measured(path).model_copy(update=fields), path)


def test_runs_on_gpus_calibrate_profiles_of_gpus(folder, capsys):
    """They were refused while their passes were timed as the host handed them over."""
    change(folder, device="cuda")
    profiled_on("cuda:1", folder)
    words = (folder / "graph.txt", "--calibrate", folder / "run", "-o", folder / "new")
    words += ("--room", "0")  # the plan is for 2 GB in all
    code, _, err = ended(capsys, *words)
    assert (code, err) == (0, "")


def test_another_schedule_than_the_plans_is_named(folder, capsys):
    change(folder, schedule="flush")
    words = (folder / "graph.txt", "--calibrate", folder / "run", "-o", folder / "new")
    _, out, _ = ended(capsys, *words)
    assert "with flush; the plan is for weight-stashing" in " ".join(out.split())


def few(folder):
    first, second = read_measured(folder / "run/measured.json").ranks
    change(folder, ranks=(first, second.model_copy(update={"minibatches": 3})))


def unfinished(folder):
    (folder / "run/measured.json").unlink()
    (folder / "run/metrics.jsonl").touch()


def other_ranks(folder):
    path = folder / "run/measured.json"
    data = json.loads(path.read_text())
    data["ranks"][1]["stage"] = 0
    path.write_text(json.dumps(data))


def on_mesh(folder):
    """Replicas that were alone are teams of one now, which says as much."""
    plan = read_measured(folder / "run/measured.json").plan
    stages = tuple(stage.model_copy(update={"mesh": (1,)}) for stage in plan.stages)
    change(folder, plan=plan.model_copy(update={"stages": stages}))


MISTAKES = {
    "--calibrate RUN: its stages were on meshes of devices, and there is no OPERATORS of": on_mesh,
    "--calibrate RUN: no such folder": lambda folder: shutil.rmtree(folder / "run"),
    "--calibrate RUN: is not the folder of a run: there is no measured.json": lambda folder: (
        folder / "run/measured.json"
    ).unlink(),
    "--calibrate RUN: has no measured.json: pd-train writes it at the end of a run": (unfinished),
    "--calibrate RUN: trained another graph than GRAPH: give the graph.txt": another_graph,
    "--calibrate RUN: trained on minibatches of 8, and PROFILE was measured with 16": (
        another_batch_size
    ),
    "--calibrate RUN: trained with --device cuda, and PROFILE was measured with --device cpu": (
        another_device
    ),
    "--calibrate RUN: 3 minibatches were measured on rank 1, at least 10 are needed": few,
    "RUN/measured.json: the ranks are not those of the plan": other_ranks,
}


@pytest.mark.parametrize(("said", "spoil"), MISTAKES.items())
def test_mistakes_are_one_line(folder, said, spoil, capsys):
    spoil(folder)
    graph = folder / "graph.txt"
    code, out, err = ended(capsys, graph, "--calibrate", folder / "run", "-o", folder / "new")
    assert (code, out) == (2, "")
    for name, path in (
        ("RUN", "run"),
        ("GRAPH", "graph.txt"),
        ("PROFILE", "profile.json"),
        ("OPERATORS", "operators.json"),
    ):
        said = said.replace(name, str(folder / path))
    assert err.startswith(f"pd-optimize: {said}")
    assert err.count("\n") == 1
    assert not (folder / "new").exists()


def test_what_contradicts_itself_is_one_line(folder, capsys):
    words = (folder / "graph.txt", "--calibrate", folder / "run")
    code, _, err = ended(capsys, *words, "-o", folder)
    assert (code, err.count("\n")) == (2, 1)
    assert "would be overwritten by the graph with corrected times: name another folder" in err
    assert ended(capsys, *words, "-o", folder / "new")[0] == 0
    code, _, err = ended(capsys, *words, "--like", folder / "new/plan.json")
    assert (code, err.count("\n")) == (2, 1)
    assert "and --calibrate both say what the cluster is" in err
