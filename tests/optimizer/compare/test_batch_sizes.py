"""Which batch size is planned for: profiles made by hand, of which the best is known."""

import csv
import shutil
from dataclasses import replace
from pathlib import Path

import click
import pytest
from profiled import leaving, profile_of

from pipedream.graph.errors import UserError
from pipedream.graph.model import format_graph, read_graph
from pipedream.graph.plan import read_plan
from pipedream.graph.profile import difference, sizes_in, write_profile
from pipedream.optimizer.cli.answer.by_size import options_by_size
from pipedream.optimizer.cli.command import main, typed_options

# Parameters that no all-reduce is worth, updates that take nothing.
STRAIGHT = ("--machines", "4", "--bandwidth", "1GB", "--update-rate", "1e24", "--straight")


@pytest.fixture
def curve(tmp_path, make_graph):
    """curve(sizes, seconds): a folder of profiles of four layers like each other. `seconds` gives
    the milliseconds of one layer at a size; for each example it keeps `saved` bytes.
    """

    def make(sizes, milliseconds, saved=10, output=8.0):
        for size in sizes:
            cost = (milliseconds(size), output * size, 1000.0)
            graph = make_graph("a b c d", "a-b b-c c-d", **dict.fromkeys("abcd", cost))
            folder = tmp_path / "curve" / f"batch-{size}"
            folder.mkdir(parents=True)
            (folder / "graph.txt").write_text(format_graph(graph))
            write_profile(profile(graph, size, saved * size), folder / "profile.json")
        return tmp_path / "curve"

    return make


def profile(graph, size, saved):
    """What pd-optimize reads of profile.json."""
    node = {"outputs": leaving("x"), "saved_bytes": saved, "workspace_bytes": 0}
    return profile_of(graph, dict.fromkeys(graph.nodes, node), batch_size=size)


@pytest.fixture
def run(capsys):
    """pd-optimize: exit code, stdout, stderr."""

    def call(*words):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main.main([str(word) for word in words], prog_name="pd-optimize")
        printed = capsys.readouterr()
        return stop.value.code, printed.out, printed.err

    return call


def rows(folder):
    with (folder / "batch_sizes.csv").open(newline="") as file:
        return {int(row["batch_size"]): row for row in csv.DictReader(file)}


def test_where_calls_and_messages_take_their_time_a_large_minibatch_is_best(curve, run):
    folder = curve([1, 2, 4], lambda size: 5 + 0.1 * size)
    code, out, err = run(folder, *STRAIGHT, "--latency", "1ms")
    assert (code, err) == (0, "")
    plan = read_plan(folder / "plan" / "plan.json")
    assert (plan.batch_size, plan.asked.profile) == (4, "../batch-4/profile.json")
    found = rows(folder / "plan")
    assert [row["chosen"] for row in found.values()] == ["False", "False", "True"]
    for size, row in found.items():
        assert float(row["seconds_per_example"]) == pytest.approx((5 + 0.1 * size) * 1e-3 / size)
    assert "Batch size 4 is the fastest: 1.35 ms per example, simulated" in out
    assert "3.78 times as fast as 1, 1.93 times as fast as 2" in out
    assert "In the run config: batch_size: 4\nNext: pd-train " in out
    assert max(map(len, out.splitlines()[:10])) <= 121


def test_where_memory_is_short_the_largest_that_fits_is_best(curve, run, tmp_path):
    """A layer keeps 1 MB for each example, and stage 0 has four minibatches in flight."""
    folder = curve([1, 2, 4, 8], lambda size: 1 + 0.1 * size, saved=1e6)
    limit = ("--memory", "9MB", "--recompute", "never", "--in-flight", "least")
    code, out, err = run(folder, *STRAIGHT, *limit, "-o", tmp_path / "out")
    assert (code, err) == (0, "")
    assert read_plan(tmp_path / "out/plan.json").batch_size == 2
    found = rows(tmp_path / "out")
    assert all(float(found[size]["memory_bytes"]) <= 9e6 for size in (1, 2))
    assert all("no plan fits" in found[size]["problem"] for size in (4, 8))
    assert "does not fit" in out
    assert "batch size 8: --memory 9 MB: no plan fits" in out


OVERHEAD = {1: 76, 2: 55, 4: 49, 8: 55, 16: 76}
"""Milliseconds of 16 examples through four stages of 3 ms and 1 ms for each example of a
microbatch: (16 / size + 3) (3 + size). Bubbles cost the large ones, calls the small ones.
"""


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["latency", "flush", "gpipe"])
def test_of_a_settled_update_one_between_is_best(curve, run, objective):
    folder = curve(OVERHEAD, lambda size: 3 + size, output=1e-9)
    asked = ("--objective", "latency") if objective == "latency" else ("--schedule", objective)
    code, out, err = run(folder, *STRAIGHT, *asked, "--global-batch", "16")
    assert (code, err) == (0, "")
    for size, row in rows(folder / "plan").items():
        assert int(row["microbatches"]) == 16 // size
        assert 16e3 * float(row["seconds_per_example"]) == pytest.approx(OVERHEAD[size], rel=1e-3)
    plan = read_plan(folder / "plan" / "plan.json")
    assert (plan.batch_size, plan.predicted.microbatches) == (4, 4)
    assert "49 ms per update of 16 examples, simulated; 1.55 times as fast as 1" in out
    assert "In the run config: batch_size: 4, microbatches: 4\nNext: pd-train " in out


def test_a_size_that_does_not_divide_the_update_is_left_out(curve, run):
    folder = curve([2, 3, 4], lambda size: 3 + size)
    code, out, _ = run(folder, *STRAIGHT, "--schedule", "2bw", "--global-batch", "16")
    assert code == 0
    assert "does not divide 16" in out
    assert rows(folder / "plan")[3]["problem"] == "does not divide 16"
    assert read_plan(folder / "plan" / "plan.json").batch_size == 4


@pytest.mark.slow
def test_the_plan_can_be_made_again_and_is_the_one_of_its_size(curve, run, tmp_path):
    folder = curve([1, 2], lambda size: 5 + size)
    assert run(folder, *STRAIGHT, "-o", tmp_path / "a")[0] == 0
    assert run(folder, "--like", tmp_path / "a/plan.json", "-o", tmp_path / "b")[0] == 0
    assert run(folder / "batch-2/graph.txt", *STRAIGHT, "-o", tmp_path / "c")[0] == 0
    a, b, c = (read_plan(tmp_path / name / "plan.json") for name in "abc")
    assert a == b == c
    assert read_graph(tmp_path / "a/graph.txt") == read_graph(tmp_path / "c/graph.txt")


def test_without_profile_json_the_folder_says_the_size(curve, run):
    folder = curve([1, 2], lambda size: 5 + size)
    for size in (1, 2):
        (folder / f"batch-{size}/profile.json").unlink()
    assert run(folder, *STRAIGHT)[0] == 0
    assert read_plan(folder / "plan" / "plan.json").batch_size == 2


WRONG = {
    "no sizes": ("plain", (), "no profiles of batch sizes here"),
    "one graph": (
        "curve/batch-2/graph.txt",
        ("--schedule", "flush", "--global-batch", "5"),
        "is not a multiple of 2, the batch size of",
    ),
    "an update of one": (
        "curve",
        ("--global-batch", "4", "--schedule", "weight-stashing"),
        "weight-stashing updates after every",
    ),
    "another schedule": (
        "curve",
        ("--global-batch", "4", "--schedule", "vertical-sync"),
        "vertical-sync updates after every",
    ),
    "both": (
        "curve",
        ("--global-batch", "4", "--schedule", "flush", "--microbatches", "2"),
        "--global-batch and --microbatches both set the examples per update",
    ),
    "no divisor": (
        "curve",
        ("--global-batch", "5", "--schedule", "flush"),
        "--global-batch 5: is not a multiple of any batch size (2, 4)",
    ),
    "a profile": ("curve", ("--profile", "curve/batch-2/profile.json"), "leave it out"),
    "into the folder": ("curve", ("-o", "curve"), "this is the profile folder: choose another"),
    "nothing fits": (
        "curve",
        ("--memory", "1kB"),
        "no batch size has a plan; batch size 2: --memory 1 kB",
    ),
    "another model": ("other", (), "batch-4 is of another model than batch-2: a is Sort(a) at 2"),
    "a name that lies": (
        "lying",
        (),
        "lying/batch-4/profile.json: batch_size is 2, but the folder's name says 4",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_every_mistake_is_one_line_and_exit_code_2(curve, run, tmp_path, monkeypatch, wrong):
    monkeypatch.chdir(tmp_path)
    folder = curve([2, 4], lambda size: 3 + size)
    (tmp_path / "plain").mkdir()
    for name, other in (("lying", 2), ("other", 4)):
        shutil.copytree(folder / f"batch-{other}", tmp_path / name / "batch-4")
        shutil.copytree(folder / "batch-2", tmp_path / name / "batch-2")
    graph = tmp_path / "other/batch-2/graph.txt"
    graph.write_text(graph.read_text().replace("Linear(a)", "Sort(a)"))
    named, options, told = WRONG[wrong]
    code, _, err = run(named, *STRAIGHT, *options)
    assert code == 2
    assert err.startswith("pd-optimize: ")
    assert told in err
    assert err.count("\n") == 1


def test_a_run_has_one_batch_size(curve):
    folder = curve([1, 2], lambda size: 3 + size)
    context = click.Context(main)
    main.parse_args(context, [str(folder), *STRAIGHT])
    options = replace(typed_options(context), calibrate=(Path("run"),))
    with pytest.raises(UserError, match="--calibrate: a run has one batch size"):
        options_by_size(options)


def test_folders_of_sizes_are_found_in_their_order(tmp_path):
    for name in ("batch-16", "batch-2", "batch-02", "batch-x", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "graph.txt").write_text("")
    (tmp_path / "batch-8").mkdir()
    assert sizes_in(tmp_path) == [2, 16]


def test_the_first_difference_is_named(make_graph):
    one = make_graph("a b c", "a-b b-c")
    assert difference(one, 1, make_graph("a b c", "a-b b-c", b=(9, 1, 1)), 2) is None
    assert "other inputs at 2" in difference(one, 1, make_graph("a b c", "a-b a-c"), 2)
    assert difference(one, 1, make_graph("a b", "a-b"), 2) == "3 nodes at 1 and 2 at 2"
