"""What is asked before machines are rented: an update of so many examples of so many tokens."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
from profiled import profile_of

from pipedream.graph.cluster import Cluster, DeviceType
from pipedream.graph.errors import UserError
from pipedream.graph.model import Graph, Node, format_graph
from pipedream.graph.plan import Plan
from pipedream.graph.profile import Estimated, Profile, ProfiledTensor, folder_of, write_profile
from pipedream.optimizer.choose.chooser import choose
from pipedream.optimizer.cli.answer.plan import plan
from pipedream.optimizer.cli.answer.update import is_open
from pipedream.optimizer.cli.options import Options
from pipedream.optimizer.cli.planning import Planning
from pipedream.optimizer.cli.task import make_task
from pipedream.optimizer.cli.values import make_options
from pipedream.optimizer.compare.considered import saved_by
from pipedream.optimizer.compare.scaled import half_of, twice

TOKENS = 16
NAMES = [f"n{k}" for k in range(12)]
FOUR = {"machines": "4", "bandwidth": "100GB", "intra_op": "none"}


def graph_of(seconds: float, output: float, parameters: float) -> Graph:
    """A chain of twelve layers, the first of them the tokens."""
    nodes = {
        name: Node(name, f"Linear({name})", seconds / 3, seconds * 2 / 3, (output,), parameters)
        for name in NAMES
    }
    nodes["in"] = Node("in", "Input0", 0.0, 0.0, (8.0 * TOKENS,), 0.0)
    order = ["in", *NAMES]
    return Graph({name: nodes[name] for name in order}, tuple(itertools.pairwise(order)))


def profiled(graph: Graph, size: int, saved: int, **changes: Any) -> Profile:
    tensor = {"name": "x", "dtype": "int64", "bytes": 8, "requires_grad": False}
    tokens = ProfiledTensor(shape=(size, TOKENS), **tensor)
    node: dict[str, Any] = {"saved_bytes": saved, "workspace_bytes": 0}
    own: dict[str, dict[str, Any]] = dict.fromkeys(NAMES, node)
    own["in"] = {"outputs": (tokens,), "saved_bytes": 0, "workspace_bytes": 0}
    return profile_of(graph, own, batch_size=size, model="transformers:llama", **changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Profiles at batch sizes 1, 2 and 4: of less and less time per example."""
    for size, seconds in ((1, 1.0e-3), (2, 1.8e-3), (4, 3.4e-3)):
        graph = graph_of(seconds, 1e3 * size, 1e6)
        write(folder_of(tmp_path / "sizes", size), graph, profiled(graph, size, 1000 * size))
    return tmp_path / "sizes"


def write(folder: Path, graph: Graph, own: Profile) -> None:
    folder.mkdir(parents=True)
    (folder / "graph.txt").write_text(format_graph(graph))
    write_profile(own, folder / "profile.json")


def planned(graph: Path, **given: Any) -> Planning:
    return plan(make_options(graph, FOUR | given))


def seconds_of(of: Plan) -> float:
    assert of.predicted.simulated is not None
    return of.predicted.simulated.seconds_per_minibatch


def test_an_update_is_one_of_plain_training_and_the_fastest_of_all_batch_sizes(
    folder: Path,
) -> None:
    """Beside each batch size, planned fully by itself."""
    found = planned(folder, global_batch=32)
    alone = {
        size: planned(
            folder_of(folder, size) / "graph.txt", schedule="flush", microbatches=32 // size
        )
        for size in (1, 2, 4)
    }
    updates = {size: 32 // size * seconds_of(each.outcome.plan) for size, each in alone.items()}
    chosen = found.outcome.plan
    assert (chosen.schedule, chosen.batch_size) == ("flush", min(updates, key=updates.__getitem__))
    assert chosen.predicted.microbatches == 32 // chosen.batch_size
    assert 32 // chosen.batch_size * seconds_of(chosen) <= min(updates.values()) * (1 + 1e-9)
    rows = {row.batch_size: row for row in found.considered if row.order == "1f1b"}
    assert set(rows) == {1, 2, 4}
    assert [size for size, row in rows.items() if row.chosen] == [chosen.batch_size]
    for size, row in rows.items():  # rough ones are no faster than full ones
        assert row.seconds is not None
        assert updates[size] * (1 - 1e-9) <= row.seconds <= updates[size] * 1.3
    assert any(row.rough for row in rows.values())  # not all were planned fully
    assert found.choices is not None
    assert found.choices.best.batch_size == chosen.batch_size


def test_what_the_user_sets_is_not_chosen() -> None:
    asked = Options(Path("graph.txt"), global_batch=8, schedule="flush")
    assert is_open(asked)
    others: tuple[dict[str, Any], ...] = (
        {"order": "zb-h1"},
        {"split": "a"},
        {"schedule": "gpipe"},
        {"objective": "latency"},
        {"cost_model": "paper"},
        {"global_batch": None},
    )
    for other in others:
        assert not is_open(Options(**({**vars(asked)} | other)))


def test_a_pipeline_of_few_microbatches_gets_an_order_that_waits_less(folder: Path) -> None:
    graph = folder_of(folder, 1) / "graph.txt"
    found = planned(graph, global_batch=6, straight=True)
    plain = planned(graph, schedule="flush", microbatches=6, straight=True).outcome.plan
    chosen = found.outcome.plan
    assert chosen.order is not None
    assert seconds_of(chosen) < 0.99 * seconds_of(plain)
    row = next(row for row in found.considered if row.chosen)
    assert (row.order, row.seconds) == (chosen.order, pytest.approx(6 * seconds_of(chosen)))
    assert sum(row.chosen for row in found.considered) == 1
    again = planned(
        graph,
        global_batch=6,
        straight=True,
        order=chosen.order,
        stages_per_rank=found.options.stages_per_rank,
    )
    assert seconds_of(again.outcome.plan) <= seconds_of(chosen) * 1.001


def test_where_workers_do_not_wait_no_other_order_is_tried(folder: Path) -> None:
    found = planned(folder, global_batch=512)
    assert {row.order for row in found.considered} == {"1f1b"}
    assert any("Other orders of passes were not tried" in note for note in found.outcome.notes)


@pytest.mark.thorough
def test_a_size_that_needs_too_much_memory_is_told_or_saves_some(folder: Path) -> None:
    """12 MB of parameters and as much of gradients: 40 MB leave room for small minibatches."""
    for size in (1, 2, 4):
        graph = graph_of(1e-3 * size, 1e3 * size, 1e6)
        own = profiled(graph, size, saved=700_000 * size)
        shutil.rmtree(folder_of(folder, size))
        write(folder_of(folder, size), graph, own)
    found = planned(folder, global_batch=8, memory="33MB", optimizer="sgd", zero="never")
    for row in found.considered:
        if row.plan is not None:
            assert max(stage.memory_bytes for stage in row.plan.stages) <= 33e6
            recomputes = any(stage.recompute for stage in row.plan.stages)
            assert ("recompute" in saved_by(row.plan)) == recomputes
    with pytest.raises(UserError, match="no batch size has a plan; batch size 1: --memory 1 kB"):
        planned(folder, global_batch=8, memory="1kB")


def test_half_and_twice_the_machines_of_what_divides_evenly(folder: Path) -> None:
    """Compute alone: half the devices take twice as long, twice as many half."""
    found = planned(
        folder_of(folder, 1) / "graph.txt", global_batch=1024, bandwidth="1e18", update_rate="1e24"
    )
    assert [each.cluster.devices for each in found.scaled] == [2, 4, 8]
    half, own, double = (each.seconds for each in found.scaled)
    assert own == found.outcome.plan.predicted.seconds_in_a_run
    assert half == pytest.approx(2 * own, rel=0.01)
    assert double == pytest.approx(own / 2, rel=0.01)
    graph = choose(
        make_task(found.options).request
    )  # the planner itself, on the machines asked for
    assert seconds_of(graph.plan) == pytest.approx(seconds_of(found.outcome.plan))


def test_the_outermost_level_is_halved_and_doubled() -> None:
    two = Cluster(machines=(8, 2), bandwidth=(4e11, 4e10))
    assert (half_of(two) or two).machines == (8,)
    assert (twice(two) or two).machines == (8, 4)
    assert half_of(Cluster(machines=(1,), bandwidth=(1e9,))) is None
    kinds = (DeviceType(name="a"), DeviceType(name="b", speed=2.0))
    mixed = Cluster(machines=(2,), bandwidth=(1e9,), kinds=kinds, machine_kinds=("a", "b"))
    assert half_of(mixed) is None
    assert twice(mixed) is None


def test_one_named_machine_becomes_two_with_links_between_them(folder: Path) -> None:
    given = {"cluster": "dgx-h100:1", "machines": None, "bandwidth": None}
    found = planned(folder_of(folder, 1) / "graph.txt", global_batch=64, **given)
    assert [each.cluster.machines for each in found.scaled] == [(4,), (8,), (8, 2)]


def test_the_sequence_length_picks_profiles_or_says_what_makes_them(
    folder: Path, tmp_path: Path
) -> None:
    assert planned(folder, sequence=TOKENS, global_batch=8).outcome.plan.batch_size in (1, 2, 4)
    with pytest.raises(UserError) as told:
        planned(folder, sequence=32)
    words = told.value.format_message()
    assert "has 16 tokens" in words
    assert "pd-profile transformers:llama --batch-sizes 1,2,4 --sequence 32" in words
    assert "\n" not in words
    several = tmp_path / "several"
    shutil.copytree(folder, several / f"sequence-{TOKENS}")
    found = planned(several, sequence=TOKENS)
    assert str(found.options.graph).startswith(str(several / f"sequence-{TOKENS}"))
    with pytest.raises(UserError, match="several sequence lengths: add --sequence 16"):
        planned(several)


def test_what_the_profile_says_of_sequences_comes_before_its_inputs(tmp_path: Path) -> None:
    graph = graph_of(1e-3, 1e3, 1e6)
    assert profiled(graph, 2, 1000).tokens == TOKENS
    assert profiled(graph, 2, 1000, sequence=7).tokens == 7


def test_the_host_is_as_near_as_the_device_file_says(tmp_path: Path) -> None:
    graph = graph_of(1e-3, 1e3, 1e6)
    known = Estimated(device="d", error=None, worst=None, peak=1.0, host_bandwidth=5e10)
    write(tmp_path / "e", graph, profiled(graph, 1, 1000, estimated=known))
    path = tmp_path / "e" / "graph.txt"
    assert make_task(make_options(path, FOUR)).request.host_bandwidth == 5e10
    typed = make_options(path, FOUR | {"host_bandwidth": "2GB"})
    assert make_task(typed).request.host_bandwidth == 2e9
    none = make_options(path, FOUR | {"host_bandwidth": "0"})
    assert make_task(none).request.host_bandwidth is None


def test_an_update_that_the_batch_size_does_not_divide_says_what_would(folder: Path) -> None:
    graph = folder_of(folder, 4) / "graph.txt"
    with pytest.raises(UserError, match="give 8 or 12, or profile another --batch-size"):
        planned(graph, global_batch=10)
    with pytest.raises(UserError, match="give 4, or"):
        planned(graph, global_batch=3)
