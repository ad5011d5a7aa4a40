"""Planning as an earlier plan was made: its options, and so many of its devices."""

import json

import click
import pytest

from pipedream.graph.cluster import Cluster, DeviceType, Link
from pipedream.graph.errors import UserError
from pipedream.graph.model import format_graph
from pipedream.graph.plan import read_plan
from pipedream.optimizer.cli.cluster_options import cluster_of
from pipedream.optimizer.cli.command import main, typed_options
from pipedream.optimizer.cli.like import remaining
from pipedream.optimizer.cli.task import make_task
from pipedream.optimizer.search.request import Request


def typed(*words):
    """The options as the command would have them."""
    context = click.Context(main)
    main.parse_args(context, [str(word) for word in words])
    return typed_options(context)


def planned(*words):
    """Runs pd-optimize here."""
    with pytest.raises(SystemExit) as ended:
        main.main([str(word) for word in words])
    assert ended.value.code == 0


@pytest.fixture
def graph(tmp_path, make_graph):
    path = tmp_path / "graph.txt"
    costs = dict.fromkeys("abcd", (5, 1000, 1000000.0))
    path.write_text(format_graph(make_graph("a b c d", "a-b b-c c-d", **costs)))
    return path


OPTIONS = (
    ("--memory", "60MB", "--recompute", "never", "--fewer-machines", "--update-rate", "1GB"),
    ("--straight", "--optimizer", "sgd", "--weight-prediction"),
    ("--cost-model", "released", "--activation-compression", "2"),
    ("--schedule", "flush", "--microbatches", "12", "--optimizer", "momentum"),
    ("--objective", "latency", "--microbatches", "8", "--epsilon", "0.001", "--layers", "3"),
)


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_the_same_is_asked_again(graph, options):
    cluster = ("--machines", "2,2", "--bandwidth", "1GB,500MB", "--latency", "1us,1ms")
    planned(graph, *cluster, *options)
    path = graph.parent / "plan" / "plan.json"
    first = make_task(typed(graph, *cluster, *options))
    again = make_task(typed(graph, "--like", path))
    # The model is a new object each time; and a plan names the number of microbatches it is for.
    fields = {name for name, each in Request.__dataclass_fields__.items() if each.compare}
    for field in fields - {"model", "graph", "microbatches"}:
        assert getattr(again.request, field) == getattr(first.request, field), field
    assert again.request.settings == first.request.settings
    assert type(again.request.model) is type(first.request.model)
    planned(graph, "--like", path, "-o", graph.parent / "again")
    assert (graph.parent / "again" / "plan.json").read_text() == path.read_text()


def test_what_is_typed_goes_first(graph):
    planned(graph, "--machines", "4", "--bandwidth", "1GB", "--memory", "60MB", "--straight")
    plan = graph.parent / "plan" / "plan.json"
    task = make_task(typed(graph, "--like", plan, "--memory", "80MB", "--schedule", "2bw"))
    assert (task.request.memory, task.request.schedule) == (80e6, "2bw")
    assert task.request.rules.straight


def test_the_profile_is_found_from_the_plans_folder(graph, monkeypatch):
    """Also where the plan was made from elsewhere; none is looked for where none was used."""
    planned(graph, "--machines", "4", "--bandwidth", "1GB", "-o", graph.parent / "plan")
    path = graph.parent / "plan" / "plan.json"
    assert typed(graph, "--like", path).profile is None
    data = json.loads(path.read_text())
    data["asked"]["profile"] = "../profile.json"
    path.write_text(json.dumps(data))
    monkeypatch.chdir("/")
    assert typed(graph, "--like", path).profile.resolve() == graph.parent / "profile.json"


def test_a_plan_that_remembers_nothing_will_do(graph):
    """One made before plans did."""
    planned(graph, "--machines", "4", "--bandwidth", "1GB", "--schedule", "vertical-sync")
    path = graph.parent / "plan" / "plan.json"
    data = json.loads(path.read_text())
    del data["asked"]
    path.write_text(json.dumps(data))
    assert read_plan(path).asked is None
    assert make_task(typed(graph, "--like", path)).request.schedule == "vertical-sync"


# What is left of a cluster ---------------------------------------------------------------------


def test_whole_machines_are_machines_and_others_one_level():
    link = Link(points=((1, 1e-3), (2, 2e-3)))
    cluster = Cluster(
        machines=(4, 2), bandwidth=(10e9, 1e9), latency=(1e-6, 1e-3), send=(None, link)
    )
    assert remaining(cluster, 8) == cluster
    assert remaining(cluster, 4) == Cluster(
        machines=(4,), bandwidth=(10e9,), latency=(1e-6,), send=(None,)
    )
    assert remaining(cluster, 3).machines == (3,)
    assert remaining(cluster, 3).bandwidth == (10e9,)
    assert remaining(cluster, 7) == Cluster(
        machines=(7,), bandwidth=(1e9,), latency=(1e-3,), send=(link,)
    )


def test_kinds_are_those_of_the_first_devices():
    kinds = (DeviceType(name="new"), DeviceType(name="old", speed=0.5))
    cluster = Cluster(
        machines=(2, 3),
        bandwidth=(10e9, 1e9),
        kinds=kinds,
        machine_kinds=("new", "old", "new"),
    )
    assert remaining(cluster, 6) == cluster
    assert remaining(cluster, 5).machine_kinds == ("new", "new", "old", "old", "new")
    assert remaining(cluster, 4).machine_kinds == ("new", "old")
    assert remaining(cluster, 2).machine_kinds == ("new", "new")
    assert remaining(cluster, 1).machine_kinds == ("new",)
    assert all(remaining(cluster, count).devices == count for count in range(1, 7))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--workers", "2"), "--workers needs --like PLAN"),
        (("--like", "PLAN", "--workers", "5"), "--workers 5: the cluster of .* has 4 devices"),
        (("--like", "PLAN", "--machines", "2"), "--like .* and --machines both say"),
        (("--like", "PLAN", "--cluster", "c.yaml"), "--like .* and --cluster both say"),
    ],
)
def test_mistakes_are_one_line(graph, words, problem):
    planned(graph, "--machines", "4", "--bandwidth", "1GB")
    plan = str(graph.parent / "plan" / "plan.json")
    with pytest.raises(UserError, match=problem):
        cluster_of(typed(graph, *(plan if word == "PLAN" else word for word in words)))


MESH = ("--machines", "4", "--bandwidth", "1TB", "--schedule", "flush", "--microbatches", "2")


@pytest.mark.slow
def test_a_mesh_is_kept_where_it_divides_the_workers_and_else_searched_anew(perceptron, capsys):
    graph, path = perceptron / "graph.txt", perceptron / "meshes/plan.json"
    planned(graph, *MESH, "--mesh", "2", "--shard", "0.weight=S(0)", "-o", path.parent)
    for workers, kept in ((2, True), (3, False)):
        folder = perceptron / f"workers{workers}"
        # As pd-train does: with the graph beside the plan, whose operators are with the profile.
        beside = path.with_name("graph.txt")
        planned(beside, "--like", path, "--workers", workers, "-o", folder)
        made, said = read_plan(folder / "plan.json"), capsys.readouterr().out
        assert made.workers <= workers
        meshes = {stage.mesh for stage in made.stages}
        assert meshes == {(2,)} if kept else meshes <= {None, (3,)}
        assert ("Teams of --mesh 2 do not divide the devices" in said) != kept
        assert made.asked.mesh == ("2" if kept else None)
