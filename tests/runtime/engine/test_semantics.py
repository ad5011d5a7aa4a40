"""A distributed run computes what its schedule means: losses and weights of the serial reference.

Replicas (4, 3, 1), counts that do not divide each other, hang in the released PipeDream. The
examples of an epoch do not divide either: its last minibatch is smaller, and counts like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import ModuleType

import pytest
import small_models
import torch
from plans import make_plan
from schedules import policy
from torch import nn
from training import losses, run_jobs, weights

from pipedream.capture.captured import Captured
from pipedream.capture.export import capture
from pipedream.capture.sources.load import load_data
from pipedream.graph.choices import SCHEDULES, ScheduleName
from pipedream.graph.plan import Plan
from pipedream.graph.run_config import DataFactory, Factory, OptimizerConfig, RunConfig
from pipedream.runtime.data.reader import Epoch
from pipedream.runtime.run.job import Job
from pipedream.runtime.stages.partition import interfaces, links

SUPPORT = Path(small_models.__file__).parent
TOLERANCE = {"float32": 1e-5, "float64": 1e-12}
EPOCHS = 2
REGRESSION = DataFactory(source="small_models:regression", args={"examples": 63})
CLASSES = DataFactory(source="small_models:classes", args={"examples": 84})
"""In minibatches of 4 both are 15 and a smaller one of 3."""
SGD = OptimizerConfig(name="SGD", args={"lr": 0.2, "momentum": 0.9, "weight_decay": 0.01})
ADAM = OptimizerConfig(name="AdamW", args={"lr": 0.02})


def config_for(model: str, dtype: str, optimizer: OptimizerConfig) -> RunConfig:
    return RunConfig(
        format="pipedream-run/1",
        model=Factory(source=f"small_models:{model}"),
        data=REGRESSION,
        loss="mse_loss",
        optimizer=optimizer,
        batch_size=4,
        microbatches=5,
        epochs=EPOCHS,
        seed=3,
        dtype=dtype,  # type: ignore[arg-type]
    )


def plan_for(
    captured: Captured,
    parts: Sequence[str],
    replicas: Sequence[int],
    recompute: Collection[int] = (),
    again: Collection[str] = (),
) -> Plan:
    """Stages made of the modules whose names stand in `parts`, such as ("a", "bc"). `again`: single
    nodes that are recomputed.
    """
    stage_of = {letter: stage for stage, letters in enumerate(parts) for letter in letters}
    pieces: list[list[str]] = [[] for _ in parts]
    for node in captured.graph.order:
        path = captured.module_paths[node]
        is_input = captured.graph.nodes[node].is_input
        pieces[0 if is_input else stage_of.get(path[:1], len(parts) - 1)].append(node)
    return make_plan(captured.graph, pieces, replicas, recompute=recompute, again=again)


def chain_stages(serial: ModuleType, model: nn.Module, parts: Sequence[str]) -> list[object]:
    names = ["x", *[f"h{stage}" for stage in range(1, len(parts))], "y"]
    return [
        serial.Stage(Named(model, letters), (names[stage],), (names[stage + 1],))
        for stage, letters in enumerate(parts)
    ]


def skip_stages(serial: ModuleType, model: nn.Module, parts: Sequence[str]) -> list[object]:
    third = serial.Stage(small_models.Tail(model.c), ("second", "first"), ("y",))
    second = serial.Stage(Named(model, "b"), ("first",), ("second",))
    first = serial.Stage(Named(model, "a"), ("x",), ("first",))
    if len(parts) == 3:
        return [first, second, third]
    return [first, serial.Stage(Both(model), ("first",), ("y",))]


class Named(nn.Sequential):
    """Some layers of a model, under the names they have there."""

    def __init__(self, model: nn.Module, letters: str) -> None:
        super().__init__()
        for name, layer in model.named_children():
            if name[0] in letters:
                self.add_module(name, layer)


class Both(nn.Module):
    """The second and third part of Skips."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.b, self.c = model.b, model.c

    def forward(self, first: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(first) + first) * first


StageMaker = Callable[[ModuleType, nn.Module, Sequence[str]], list[object]]


def assert_equals_serial(
    job: Job, serial: ModuleType, make: StageMaker, parts: Sequence[str]
) -> None:
    config = job.config
    dtype = getattr(torch, config.dtype)
    torch.manual_seed(config.seed)
    model = getattr(small_models, config.model.source.partition(":")[2])().to(dtype)
    reference = serial.Serial(
        make(serial, model, parts),
        lambda parameters: getattr(torch.optim, config.optimizer.name)(
            parameters, **config.optimizer.args
        ),
        lambda values, target: nn.functional.mse_loss(values["y"], target),
        job.schedule,
        job.plan.replicas,
        config.microbatches,
        config.accumulate,
    )
    data, _ = load_data(config, SUPPORT)
    expected: list[float] = []
    for number in range(1, EPOCHS + 1):
        epoch = Epoch(data, config, number, torch.device("cpu"))
        batches = [epoch.batch(index) for index in range(len(epoch))]
        expected += reference.epoch(
            [serial.Minibatch({"x": batch.inputs[0]}, batch.target) for batch in batches]
        )
    assert len(expected) == 16 * EPOCHS
    tolerance = TOLERANCE[config.dtype]
    assert losses(job) == pytest.approx(expected, rel=tolerance, abs=tolerance)
    found = weights(job)
    assert set(found) == set(reference.weights) | set(reference.buffers)
    for name, tensor in {**reference.weights, **reference.buffers}.items():
        torch.testing.assert_close(found[name], tensor, rtol=tolerance, atol=tolerance)


REPLICAS = [(1, 1), (2, 1), (1, 2), (3, 1), (2, 1, 1), (1, 2, 1), (4, 3, 1)]
MODELS: dict[str, StageMaker] = {"Chain": chain_stages, "Skips": skip_stages}

ALL_SCHEDULES_IN = {"Chain": "float64", "Skips": "float32"}
SCHEDULES_IN_BOTH: Sequence[ScheduleName] = ("weight-stashing", "flush")
"""Each run takes a second: the other schedules with each model in one of the types."""


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_losses_and_weights_are_those_of_the_serial_reference(
    name: str, dtype: str, serial: ModuleType, tmp_path: Path
) -> None:
    captured = capture(getattr(small_models, name)(), (torch.randn(4, 6),))
    jobs, parts_of = [], []
    for replicas in REPLICAS:
        parts = ("a", "bc") if len(replicas) == 2 else ("a", "b", "c")
        plan = plan_for(captured, parts, replicas)
        for schedule in SCHEDULES if dtype == ALL_SCHEDULES_IN[name] else SCHEDULES_IN_BOTH:
            optimizer = ADAM if dtype == "float64" and schedule == "flush" else SGD
            config = config_for(name, dtype, optimizer)
            least = policy(schedule, replicas).least_microbatches
            if config.microbatches < least:
                config = config.model_copy(update={"microbatches": least})
            run = tmp_path / f"{schedule}-{'-'.join(map(str, replicas))}"
            jobs.append(Job(plan, config, SUPPORT, run, schedule=schedule, epochs=EPOCHS))
            parts_of.append(parts)
    run_jobs(jobs)
    for job, parts in zip(jobs, parts_of, strict=True):
        assert_equals_serial(job, serial, MODELS[name], parts)


SENTENCES = DataFactory(
    source="small_models:sentences",
    args={"examples": 63},
    collate="small_models:cut",
    varying=True,
)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("replicas", [(1, 1), (2, 1), (1, 2, 1)], ids=str)
def test_minibatches_of_eight_lengths(
    replicas: tuple[int, ...], serial: ModuleType, tmp_path: Path
) -> None:
    """Each schedule; stages are captured once for each length, and no rank waits for another that
    expects other shapes.
    """
    captured = capture(small_models.Skips(), (torch.randn(4, 3, 6),))
    parts = ("a", "bc") if len(replicas) == 2 else ("a", "b", "c")
    plan = plan_for(captured, parts, replicas)
    config = config_for("Skips", "float64", SGD).model_copy(update={"data": SENTENCES})
    jobs = [
        Job(plan, config, SUPPORT, tmp_path / schedule, schedule=schedule, epochs=EPOCHS)
        for schedule in SCHEDULES
    ]
    run_jobs(jobs)
    for job in jobs:
        assert_equals_serial(job, serial, skip_stages, parts)


def test_the_skip_is_a_link_of_its_own_past_the_second_stage() -> None:
    captured = capture(small_models.Skips(), (torch.randn(4, 6),))
    plan = plan_for(captured, ("a", "b", "c"), (1, 1, 1))
    assert set(links(interfaces(captured, plan))) == {(0, 1), (0, 2), (1, 2)}


@pytest.mark.thorough
@pytest.mark.slow
def test_whole_numbers_and_truth_values_go_from_stage_to_stage(tmp_path: Path) -> None:
    """An order and a mask have no gradient to come back; on one worker they go nowhere."""
    captured = capture(small_models.Sorted(), (torch.randn(4, 6),))
    config = config_for("Sorted", "float64", SGD)
    one, other = (
        Job(plan, config, SUPPORT, tmp_path / str(plan.workers), schedule="flush", epochs=EPOCHS)
        for plan in (
            plan_for(captured, ("ambc",), (1,)),
            plan_for(captured, ("am", "b", "c"), (2, 1, 1)),
        )
    )
    first, *_ = interfaces(captured, other.plan)
    assert {torch.int64, torch.bool} < {value.dtype for value in first.sends[2]}
    run_jobs([one])
    run_jobs([other])
    assert losses(other) == pytest.approx(losses(one), rel=1e-12)
    for name, tensor in weights(one).items():
        torch.testing.assert_close(weights(other)[name], tensor, rtol=1e-12, atol=1e-12)


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("replicas", [(1, 1), (3, 2)], ids=str)
def test_batch_norm_statistics_move_with_their_replica_and_are_averaged_when_saved(
    replicas: tuple[int, int], serial: ModuleType, tmp_path: Path
) -> None:
    captured = capture(small_models.Normed(), (torch.randn(4, 6),))
    plan = plan_for(captured, ("an", "c"), replicas)
    config = config_for("Normed", "float64", SGD)
    job = Job(plan, config, SUPPORT, tmp_path, epochs=EPOCHS)
    run_jobs([job])
    assert_equals_serial(job, serial, chain_stages, ("an", "c"))


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["weight-stashing", "gpipe"])
def test_recomputation_changes_nothing_batch_norm_moves_once(
    schedule: str, serial: ModuleType, tmp_path: Path
) -> None:
    """All stages but the last do their forward pass again, on the version they used before."""
    jobs = []
    for name, parts, replicas in (
        ("Normed", ("an", "c"), (3, 1)),
        ("Skips", ("a", "b", "c"), (2, 1, 1)),
    ):
        captured = capture(getattr(small_models, name)(), (torch.randn(4, 6),))
        config = config_for(name, "float64", SGD)
        for whole, single in ((range(len(parts) - 1), ()), ((), captured.working[::2])):
            plan = plan_for(captured, parts, replicas, whole, single)
            run = tmp_path / f"{name}{len(single)}"
            jobs.append(Job(plan, config, SUPPORT, run, schedule=schedule, epochs=EPOCHS))  # type: ignore[arg-type]
    run_jobs(jobs)
    for job in jobs[:2]:
        assert_equals_serial(job, serial, chain_stages, ("an", "c"))
    for job in jobs[2:]:
        assert_equals_serial(job, serial, skip_stages, ("a", "b", "c"))


@pytest.mark.thorough
@pytest.mark.slow
def test_recomputation_draws_the_same_random_numbers(tmp_path: Path) -> None:
    """Dropout and batch norm in a stage that recomputes: every bit is that of the plain run."""
    captured = capture(small_models.Noisy(), (torch.randn(4, 6),))
    jobs = []
    for again, single in (((), ()), ((0,), ()), ((), captured.working), ((), ())):
        plan = plan_for(captured, ("and", "c"), (1, 1), again, single)
        if len(jobs) == 3:  # or all is moved to the host
            moved = [stage.model_copy(update={"offload": True}) for stage in plan.stages]
            plan = plan.model_copy(update={"stages": tuple(moved)})
        config = config_for("Noisy", "float32", ADAM).model_copy(
            update={"data": CLASSES, "loss": "cross_entropy"}
        )
        run = tmp_path / str(len(jobs))
        jobs.append(Job(plan, config, SUPPORT, run, epochs=EPOCHS))
    run_jobs(jobs)
    plain, *others = jobs
    for recomputed in others:
        assert losses(plain) == losses(recomputed)
        for name, tensor in weights(plain).items():
            assert torch.equal(tensor, weights(recomputed)[name]), name


@pytest.mark.slow
def test_dropout_draws_the_same_numbers_under_every_plan(tmp_path: Path) -> None:
    """The dropout stands in the first or the second stage, on one worker or on three."""
    captured = capture(small_models.Noisy(), (torch.randn(4, 6),))
    config = config_for("Noisy", "float64", ADAM).model_copy(
        update={"data": CLASSES, "loss": "cross_entropy"}
    )
    jobs = []
    for parts, replicas in ((("andc",), (1,)), (("an", "dc"), (1, 2)), (("and", "c"), (2, 1))):
        plan = plan_for(captured, parts, replicas)
        run = tmp_path / "-".join(parts)
        jobs.append(Job(plan, config, SUPPORT, run, schedule="flush", epochs=EPOCHS))
    run_jobs(jobs[:1])
    run_jobs(jobs[1:])
    one, *others = jobs
    parameters = [name for name in weights(one) if "running" not in name and "num_" not in name]
    for other in others:
        assert losses(other) == pytest.approx(losses(one), rel=1e-12)
        for name in parameters:
            torch.testing.assert_close(weights(other)[name], weights(one)[name])
