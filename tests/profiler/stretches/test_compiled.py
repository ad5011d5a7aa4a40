"""Stages that will be compiled are measured compiled: times and saved bytes of their nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from commands import typed
from plans import cut, make_plan
from torch import Tensor, nn

from pipedream.capture.captured import Captured
from pipedream.capture.export import capture
from pipedream.graph.plan import read_plan
from pipedream.graph.profile import read_profile
from pipedream.graph.run_config import read_config
from pipedream.profiler.stretches import full_pass, group_trial
from pipedream.profiler.stretches.full_pass import CannotCompile, _Bench, time_in_training
from pipedream.profiler.stretches.timed_stretch import (
    TimedStretch,
    saved_parts,
    seconds_of,
    wrong_gradient,
)
from pipedream.profiler.timing.passes import Stretch
from pipedream.profiler.timing.stopping_rule import Repeats, StoppingRule
from pipedream.profiler.timing.stopwatch import Stopwatch
from pipedream.runtime.run.job import Job

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def other_tests_validate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling switches the checks of torch.distributions off, for the whole process."""
    kind = torch.distributions.Distribution
    monkeypatch.setattr(kind, "_validate_args", kind._validate_args)


class Pointwise(nn.Module):
    """A layer whose values are all computed one by one, between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y = torch.sin(torch.cos(torch.sigmoid(y * 2) * torch.tanh(y)))
        z: Tensor = self.last(y)
        return z


def captured() -> tuple[Captured, tuple[Tensor]]:
    inputs = (torch.randn(16, 8),)
    return capture(Pointwise(), inputs), inputs


def test_nodes_take_the_part_that_their_compiled_stretch_does() -> None:
    """Half forward and a quarter backward in the first stretch; the second gains nothing."""
    model, inputs = captured()
    bench = _Bench(model, model.on_device(inputs, CPU).values(), CPU, None, ["eager"])  # type: ignore[arg-type]
    repeats = Repeats(StoppingRule(1, 2, 0.0))
    repeats.warm(bench.warm_up())
    bench.divide()
    for number in range(2):
        repeats.go_on(bench.repeat(number))
    parts, whole = bench.divisions["eager"]
    before = list(bench.turns)
    for each in (*parts, *whole):
        each.alone.clear()
    factors = [(0.5, 0.25)] + [(1.0, 1.0)] * (len(parts) - 1)
    for timed, factor in zip(parts, factors, strict=True):
        sums = [sum(seconds[n] for n in timed.names) for seconds in before[0]]
        timed.alone.append((0, factor[0] * sums[0], factor[1] * sums[1]))
    bench._take_gains()
    for number in range(2):
        for timed, factor in zip(parts, factors, strict=True):
            for name in timed.nodes:
                for which in (0, 1):
                    own = before[number][which][name] * factor[which]
                    assert bench.turns[number][which][name] == pytest.approx(own)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("compiled", "groups", "backend"),
    [
        (0.9, 1.0, "eager"),
        (0.995, 1.0, None),
        (1.2, 1.1, None),
        (0.9, 0.905, "groups:eager"),
        (0.9, 0.92, "eager"),
        (1.1, 0.9, "groups:eager"),
    ],
)
def test_it_is_compiled_in_the_way_that_is_fastest(
    compiled: float, groups: float, backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one per cent at least; else nodes take what they took. Groups, which are compiled sooner,
    need not be faster than the whole.
    """
    monkeypatch.setattr(group_trial, "WORTH_COMPILING", 1e9)  # each group is compiled
    inputs = (torch.randn(16, 8),)
    blocks = Pointwise(), Pointwise()
    model = capture(nn.Sequential(nn.Linear(8, 8), *blocks, nn.Linear(8, 4)), inputs)
    given = model.on_device(inputs, CPU).values()
    factors = {None: 1.0, "eager": compiled, "groups:eager": groups}
    bench = _Bench(model, given, CPU, None, list(factors))  # type: ignore[arg-type]
    repeats = Repeats(StoppingRule(1, 7, 0.0))
    repeats.warm(bench.warm_up())
    bench.divide()
    for number in range(7):
        repeats.go_on(bench.repeat(number))
    bench.turns = [bench.turns[0]] * 7
    for way, own in bench.divisions.items():
        for timed in (each for division in own for each in division):
            sums = (sum(own[name] for name in timed.names) for own in bench.turns[0])
            forward, backward = (factors[way] * own for own in sums)
            timed.alone[:] = [(0, forward, backward)]
    times = bench.times(repeats)
    assert times.backend == backend
    eagerly = times.compared[0].seconds
    found = {way.compile: way.seconds / eagerly for way in times.compared}
    assert found == pytest.approx(factors)
    assert [(way.groups, way.forms) for way in times.compared] == [(1, 1), (1, 1), (4, 3)]
    assert bool(times.saved_parts) == (backend is not None)
    took = sum(each.forward.median + each.backward.median for each in times.nodes.values())
    eager = sum(sum(each.values()) for each in bench.turns[0]) if backend is None else None
    assert eager is None or took == pytest.approx(eager, rel=0.1)


def test_groups_of_which_none_is_faster_are_no_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """But where nothing else was asked for: then all groups stay as they are."""
    monkeypatch.setattr(group_trial, "WORTH_COMPILING", 0.0)
    model, inputs = captured()
    given = model, inputs, StoppingRule(1, 1, 0.0), CPU
    times = time_in_training(*given, ways=[None, "groups:eager"])
    assert (times.backend, [way.compile for way in times.compared]) == (None, [])
    times = time_in_training(*given, ways=["groups:eager"])
    assert times.backend == "groups:eager"
    assert {name for own in times.groups for name in own.nodes} == set(model.working)


@pytest.mark.slow
def test_compiled_stretches_save_less() -> None:
    """Of values computed one by one only what they are computed of is kept."""
    model, inputs = captured()
    given, nodes, watch = model.on_device(inputs, CPU), model.working, Stopwatch()
    eager, made = (
        Stretch(model, nodes, watch, CPU, False, backend)
        for backend in (None, "aot_eager_decomp_partition")
    )
    assert made.saved_bytes(given) < eager.saved_bytes(given)


def stretch(*nodes: str) -> TimedStretch:
    return TimedStretch(nodes, nodes, None)  # type: ignore[arg-type]


def test_saved_bytes_of_stretches_add_up_to_those_of_the_whole() -> None:
    small = [(stretch("a", "b"), 100, 400), (stretch("c"), 100, 200)]
    assert saved_parts(small, (200, 1200)) == {"a": 8.0, "b": 8.0, "c": 4.0}
    parts = saved_parts(small, (200, 150))
    assert parts == pytest.approx({"a": 1.0, "b": 1.0, "c": 0.5})
    assert saved_parts([(stretch("a"), 0, 0)], (0, 0)) == {"a": 1.0}


def test_a_slow_moment_decides_nothing() -> None:
    """Compiled passes ran in a repeat in which all took three times as long."""
    turns = [({"a": 1.0}, {"a": 2.0}), ({"a": 3.0}, {"a": 6.0})]
    eager, made = stretch("a"), stretch("a")
    eager.alone.append((0, 1.0, 2.0))
    made.alone.append((1, 2.7, 5.4))
    found = seconds_of({None: [eager], "inductor": [made]}, turns)
    assert found == pytest.approx({None: 3.0, "inductor": 2.7})


class Wrong(nn.Module):
    """Its gradient is wrong where it is compiled."""

    def forward(self, x: Tensor) -> Tensor:
        return wrong_if_compiled(x)


@torch.library.custom_op("pipedream_tests::wrong_if_compiled", mutates_args=())
def wrong_if_compiled(x: Tensor) -> Tensor:
    return x.clone()


wrong_now = [False]
wrong_if_compiled.register_fake(torch.empty_like)
wrong_if_compiled.register_autograd(lambda _, gradient: gradient * (1.1 if wrong_now[0] else 1.0))


def test_wrong_gradients_are_named() -> None:
    inputs = (torch.randn(16, 8),)
    model = capture(nn.Sequential(nn.Linear(8, 8), Wrong(), nn.Linear(8, 8)), inputs)
    given = model.on_device(inputs, CPU)
    one, other = (Stretch(model, model.working, Stopwatch(), CPU, False) for _ in range(2))
    assert wrong_gradient(one, other, given) is None
    plain = other.gradients
    other.gradients = lambda values: falsified(plain, values)  # type: ignore[method-assign]
    assert wrong_gradient(one, other, given) == "0.weight"


def falsified(
    run: Callable[[Mapping[str, Tensor]], dict[str, Tensor]], values: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    wrong_now[0] = True
    try:
        return run(values)
    finally:
        wrong_now[0] = False


@pytest.mark.parametrize("choose", [False, True])
def test_a_compiler_that_fails_is_told_of(choose: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_gradient(*_: object) -> str:
        return "first.weight"

    monkeypatch.setattr(full_pass, "wrong_gradient", no_gradient)
    model, inputs = captured()
    given = model, inputs, StoppingRule(1, 1, 0.0), CPU
    why = "eager computes another gradient of first.weight"
    if not choose:
        with pytest.raises(CannotCompile, match=why):
            time_in_training(*given, ways=["eager"])
        return
    times = time_in_training(*given, ways=[None, "eager"])
    assert (times.backend, times.refused, times.saved_parts) == (None, why, {})


CONFIG = """\
format: pipedream-run/1
model: {source: "small_models:Chain"}
data: {source: "small_models:regression"}
loss: mse_loss
optimizer: {name: SGD, args: {lr: 0.05}}
batch_size: 4
compile: eager
"""


@pytest.mark.parametrize(
    ("asked", "planned", "wanted"),
    [
        ("auto", "inductor", "inductor"),
        ("auto", "groups:inductor", "groups:inductor"),
        ("auto", None, None),
        ("eager", "inductor", "eager"),
        ("stage", None, "inductor"),
        ("groups", None, "groups:inductor"),
        ("none", "inductor", None),
    ],
)
def test_with_auto_a_run_does_what_its_plan_says(
    tmp_path: Path, asked: str, planned: str | None, wanted: str | None
) -> None:
    graph = captured()[0].graph
    plan = make_plan(graph, cut(graph, 1), (1,), "flush").model_copy(update={"compile": planned})
    (tmp_path / "run.yaml").write_text(CONFIG.replace("compile: eager", f"compile: {asked}"))
    job = Job(plan, read_config(tmp_path / "run.yaml"), tmp_path, tmp_path / "run")
    assert job.compile_backend == wanted
    assert job.has_planned_compile == (asked == "auto")


@pytest.mark.slow
def test_the_run_config_says_what_is_measured_and_planned_for(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG)
    for out, words in (("own", ()), ("none", ("--compile", "none"))):
        told = ["pd-profile", "run.yaml", "-o", out, "--repeats", "1", *words]
        done = typed(tmp_path, told)
        assert done.code == 0, done.error
        assert ("are of parts compiled by eager" in done.out) == (out == "own")
        done = typed(
            tmp_path,
            ["pd-optimize", f"{out}/graph.txt", "--machines", "1", "--bandwidth", "1GB", "-o", out],
        )
        assert done.code == 0, done.error
        wanted = "eager" if out == "own" else None
        assert read_profile(tmp_path / out / "profile.json").compile == wanted
        assert read_plan(tmp_path / out / "plan.json").compile == wanted
        run = ["pd-train", f"{out}/plan.json", "--config", "run.yaml", "-o", f"run-{out}"]
        done = typed(tmp_path, run, seconds=100)
        assert done.code == 0, done.error
        said = "planned             for stages not compiled; these are compiled by eager"
        assert (said in done.out) == (out == "none")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--compile", "fast"], "--compile fast: backend 'fast' is not available; write inductor"),
        (
            ["--compile", "inductor", "--meta"],
            "compile: inductor: passes are measured compiled only where whole ones fit into memory",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path: Path, words: list[str], said: str) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG)
    done = typed(tmp_path, ["pd-profile", "run.yaml", "-o", "out", "--repeats", "1", *words])
    assert done.code == 2
    assert said in done.error
