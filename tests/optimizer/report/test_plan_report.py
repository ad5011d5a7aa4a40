from dataclasses import replace
from io import StringIO

from rich.console import Console

from pipedream.graph.cluster import Cluster, DeviceType
from pipedream.graph.model import Node
from pipedream.graph.plan import PlanningOptions
from pipedream.graph.profile import Machine
from pipedream.optimizer.choose.chooser import choose
from pipedream.optimizer.cost.models import NetworkCost, PaperCost
from pipedream.optimizer.cost.stages import Rules
from pipedream.optimizer.report.plan_report import _assumptions, _gap, _name, print_report
from pipedream.optimizer.search.latency import Latency
from pipedream.optimizer.search.planner import optimize
from pipedream.optimizer.search.request import Request


def report(graph, machines, kinds=(), **options):
    names = tuple({kind.name: kind for kind in kinds}.values())
    cluster = Cluster(
        machines=machines,
        bandwidth=(1e9,) * len(machines),
        kinds=names,
        machine_kinds=tuple(kind.name for kind in kinds),
    )
    most_cuts = options.pop("most_cuts", None)
    request = Request(graph, cluster, PaperCost(), **options)
    text = StringIO()
    outcome = optimize(request, most_cuts)
    print_report(outcome, graph, Console(file=text, width=120, highlight=False))
    return [" ".join(line.split()) for line in text.getvalue().splitlines()]


def test_a_row_for_each_stage_and_the_comparison(make_graph):
    graph = make_graph("a b c", "a-b b-c", a=(30, 1e5, 1e3), b=(6, 2e5, 1e8), c=(4, 10, 0))
    lines = report(graph, (3,))
    assert lines[0] == "data parallelism 133.3 ms this plan is 8.89 times as fast"
    assert "2 stages on 3 of 3 devices (3), weight-stashing, cost model paper" in lines
    assert "0 1 a Linear 30 ms 2 15 ms compute 2 304 kB" in lines
    assert "1 2 b Linear ... c Linear 10 ms 1 10 ms compute 1 200 MB" in lines
    assert "0 1 kB 1 kB 0 B 0 B 1 kB 200 kB 100 kB 1 kB 304 kB" in lines
    assert "Memory of one worker, with sgd's state (--optimizer)" in lines
    assert "in closed form 15 ms stage 0, the slowest, is limited by compute" in lines
    assert "simulated - too long to simulate for 3 workers" in lines
    assert "one worker 40 ms this plan is 2.67 times as fast" in lines
    assert "The best of all plans over 4 cuts under this cost model." in lines
    assert any(line.startswith("Cost model paper: a formula that may be far") for line in lines)


def test_a_chosen_plan_begins_with_the_time_to_expect(make_graph):
    graph = make_graph("a b c", "a-b b-c", a=(30, 1e5, 1e3), b=(6, 2e5, 1e8), c=(4, 10, 0))
    cluster = Cluster(machines=(3,), bandwidth=(1e9,))
    text = StringIO()
    outcome = choose(Request(graph, cluster, NetworkCost()))
    print_report(outcome, graph, Console(file=text, width=120, highlight=False))
    lines = [" ".join(line.split()) for line in text.getvalue().splitlines()]
    assert lines[0].startswith("expected in a run 15.")
    assert "per minibatch (14.16 ms to 16.17 ms in nine of ten runs)" in lines[0]
    assert lines[1].startswith("data parallelism")
    assert any(line.startswith("data parallelism 3") and "the sums of" in line for line in lines)
    assert any(line.startswith("weight-stashing 2, 1 15 ms 60 ms after every") for line in lines)
    assert any(line.startswith("flush") and line.endswith("every 4 minibatches") for line in lines)
    assert lines[-2].startswith("Assumed: links that carry their --bandwidth")
    assert "simulated; " in lines[-1]
    assert lines[-1].endswith(" by a lower bound).")


def test_the_kinds_of_devices_are_shown_where_there_are_several(make_graph):
    graph = make_graph("a b", "a-b", a=(30, 10, 0), b=(30, 10, 1e9))
    new, old = DeviceType(name="new"), DeviceType(name="old", speed=0.5)
    lines = report(graph, (3,), [old, new, old])
    assert any(line.startswith("2 stages on 3 of 3 devices (3: 2 old, 1 new)") for line in lines)
    assert "0 1 a Linear 60 ms 2 2 old 30 ms compute 2 30 B" in lines
    assert any(line.startswith("1 1 b Linear 30 ms 1 1 new") for line in lines)


def test_what_does_not_fit_is_said_of_the_simple_plans(make_graph):
    graph = make_graph("a b", "a-b", a=(30, 10, 1e6), b=(30, 10, 1e6))
    lines = report(graph, (2,), memory=3.5e6)
    remark = "this plan is 2.00 times as fast, but does not fit: it needs 4 MB on each device"
    assert f"one worker 60 ms {remark}" in lines


def test_a_plan_slower_than_one_worker_says_how_much_slower(make_graph):
    # Straight: 30 + 30 ms on one worker, or 1 GB sent between two, there and back.
    graph = make_graph("a b", "a-b", a=(30, 1e9, 0), b=(30, 10, 0))
    lines = report(graph, (2,), rules=Rules(straight=True))
    slower = [line for line in lines if line.startswith("one worker")]
    assert slower == ["one worker 60 ms this plan is 33.33 times slower than one worker"]


def test_the_best_straight_plan_is_not_called_the_best_of_all(make_graph):
    graph = make_graph("a b", "a-b", a=(30, 10, 0), b=(30, 10, 0))
    outcome = optimize(Request(graph, Cluster(machines=(2,), bandwidth=(1e9,)), PaperCost()))
    plan = outcome.plan.model_copy(update={"asked": PlanningOptions(straight=True)})
    text = StringIO()
    print_report(replace(outcome, plan=plan), graph, Console(file=text, width=120))
    assert "The best of all straight plans over" in text.getvalue()


def test_a_plan_that_is_not_proved_best_says_how_far_off_it_may_be(make_graph):
    names = "abcdefgh"
    graph = make_graph(" ".join(names), **dict.fromkeys(names, (8, 10000.0, 1000000000.0)))
    lines = report(graph, (3,), most_cuts=20)
    assert lines[-1].startswith("The graph can be cut in too many ways to try them all: the best")
    assert lines[-1].endswith(" likely cuts; no other plan is faster.")


def test_a_batch_is_compared_with_batches(make_graph):
    # Three stages of 10 ms: 30 ms for the first of 4 microbatches, 10 ms for each after it.
    graph = make_graph("a b c", "a-b b-c", **dict.fromkeys("abc", (10, 0, 1e8)))
    lines = report(graph, (3,), schedule="flush", latency=Latency(microbatches=4))
    assert "per batch 60 ms 4 microbatches; the slowest stage waits 33% of it" in lines
    assert "one worker 120 ms this plan is 2.00 times as fast" in lines
    assert lines[-1].startswith("The best of all pipelines of stages on devices of one machine")


def test_layers_say_how_far_off_the_plan_may_be(make_graph):
    graph = make_graph("a b c", "a-b b-c", **dict.fromkeys("abc", (10, 0, 0)))
    lines = report(graph, (2,), schedule="flush", latency=Latency(microbatches=1, layers=2))
    assert lines[-1].startswith("The best found of all pipelines")
    assert lines[-1].endswith("over 3 cuts; no other plan is faster.")


def test_the_gap_is_rounded_up():
    assert _gap(0.0) == "no other plan is faster"
    assert _gap(0.0001) == "at most 0.1 % slower than the best possible"
    assert _gap(0.02) == "at most 2.0 % slower than the best possible"
    assert _gap(0.0241) == "at most 2.5 % slower than the best possible"


def test_a_narrow_page_shows_every_figure_whole(make_graph):
    graph = make_graph("a b", "a-b", **dict.fromkeys("ab", (623.4, 123456.0, 123456789.0)))
    text = StringIO()
    outcome = optimize(Request(graph, Cluster(machines=(2,), bandwidth=(1e9,)), PaperCost()))
    print_report(outcome, graph, Console(file=text, width=80, highlight=False))
    assert "…" not in text.getvalue()
    assert max(map(len, text.getvalue().splitlines()[:-2])) <= 80


def test_how_fast_the_devices_are_taken_to_be_is_always_said(make_graph):
    """With --speed 1000 the report said nothing of it."""
    graph = make_graph("a b", "a-b", a=(30, 10, 0), b=(30, 10, 0))
    here = Machine(device="cpu", device_name="abacus", threads=1, python="3.11", torch="2.13")

    def said(*kinds):
        names = tuple(kind.name for kind in kinds)
        cluster = Cluster(machines=(2,), bandwidth=(1e9,), kinds=kinds, machine_kinds=2 * names)
        outcome = choose(Request(graph, cluster, NetworkCost()))
        return " ".join(_assumptions(outcome, here))

    assert "as fast as the one profiled, abacus with 1 thread; --speed says otherwise." in said()
    fast = said(DeviceType(name="fast", speed=1000.0))
    assert "Assumed: devices 1000 times as fast in every layer as the one profiled, abacus" in fast


def test_a_long_name_keeps_the_number_of_its_block():
    """All stages of ViT-L began at `...mlp.0` and ended at `...mlp.3`."""
    node = Node("node7", "Linear(in_features=1)", 0.0, 0.0, (0.0,), 0.0)
    for module, shown in (
        ("encoder.layers.encoder_layer_1.mlp.0", "...encoder_layer_1.mlp.0"),
        ("model.layers.2.self_attn.q_proj", "...2.self_attn.q_proj"),
        ("model.layers.10.mlp", "model.layers.10.mlp"),
        ("a" * 30 + ".classifier", "...classifier"),
        ("", "node7 Linear"),
        ("3", "3: Linear"),
    ):
        assert _name(node, module) == shown
