"""Stages that will be compiled are measured compiled: times and saved bytes of their nodes."""

from __future__ import annotations

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
from pipedream.profiler.timing import full_pass
from pipedream.profiler.timing.full_pass import _Bench, time_in_training
from pipedream.profiler.timing.stopping_rule import Repeats, StoppingRule
from pipedream.runtime.run.job import Job

CPU = torch.device("cpu")


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
    bench = _Bench(model, model.on_device(inputs, CPU).values(), CPU, None, "eager")  # type: ignore[arg-type]
    repeats = Repeats(StoppingRule(1, 2, 0.0))
    repeats.warm(bench.warm_up())
    bench.divide()
    for number in range(2):
        repeats.go_on(bench.repeat(number))
    parts, whole = bench.divisions
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


@pytest.mark.parametrize(("compiled", "backend"), [(0.9, "eager"), (0.995, None), (1.2, None)])
def test_it_is_compiled_where_that_is_faster(compiled: float, backend: str | None) -> None:
    """By one per cent at least; else nodes take what they took."""
    model, inputs = captured()
    given = model.on_device(inputs, CPU).values()
    bench = _Bench(model, given, CPU, None, "eager", choose=True)  # type: ignore[arg-type]
    repeats = Repeats(StoppingRule(1, 5, 0.0))
    repeats.warm(bench.warm_up())
    bench.divide()
    for number in range(5):
        repeats.go_on(bench.repeat(number))
    bench.turns = [bench.turns[0]] * 5
    for number, division in enumerate(bench.divisions):
        factor = 1.0 if number < bench.plain else compiled
        for timed in division:
            sums = (sum(own[name] for name in timed.names) for own in bench.turns[0])
            forward, backward = (factor * own for own in sums)
            timed.alone[:] = [(number, forward, backward)]
    times = bench.times(repeats)
    assert times.backend == backend
    assert times.compared is not None
    found = times.compared.compiled_seconds / times.compared.eager_seconds
    assert found == pytest.approx(compiled)
    assert bool(times.saved_parts) == (backend is not None)
    took = sum(each.forward.median + each.backward.median for each in times.nodes.values())
    eager = sum(sum(each.values()) for each in bench.turns[0]) if backend is None else None
    assert eager is None or took == pytest.approx(eager, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("divisions", [(1,), (6, 1)])
def test_saved_bytes_are_those_of_what_is_compiled(
    divisions: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of values computed one by one only what they are computed of is kept; in parts of a model
    each of which is one layer, that is as many, so what the whole model saves counts.
    """
    monkeypatch.setattr(full_pass, "_COMPILED_DIVISIONS", divisions)
    model, inputs = captured()
    rule = StoppingRule(1, 1, 0.0)
    eager = time_in_training(model, inputs, rule, CPU)
    assert eager.saved_parts == {}
    compiled = time_in_training(model, inputs, rule, CPU, backend="aot_eager_decomp_partition")
    assert compiled.saved_parts.keys() == set(model.working)
    assert min(compiled.saved_parts.values()) < 1
    assert all(0 < part <= 1 for part in compiled.saved_parts.values())


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
    [("auto", "inductor", "inductor"), ("auto", None, None), ("eager", "inductor", "eager")],
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
