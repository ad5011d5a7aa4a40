"""Corrections for late gradients: their formulas, and runs of several processes that follow them.

The references are written from the papers: Nesterov's method on the weights themselves, where the
code keeps the look-ahead; NAdam as a loop over numbers; a prediction from a list of versions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import small_models
import torch
from plans import chain_plan
from torch import Tensor, nn
from training import losses, run_jobs, weights

from pipedream.capture.export import capture
from pipedream.graph.errors import UserError
from pipedream.graph.run_config import (
    AsynchronousConfig,
    DataFactory,
    Factory,
    GroupConfig,
    OptimizerConfig,
    RunConfig,
)
from pipedream.runtime.data.reader import Epoch
from pipedream.runtime.optim.late_gradients import nesterov_form, slowing
from pipedream.runtime.run.job import Job

SUPPORT = Path(small_models.__file__).parent
TOLERANCE = {"float32": 1e-5, "float64": 1e-12}
EPOCHS, MICROBATCHES = 2, 2
RATE, MOMENTUM, DECAY = 0.2, 0.8, 0.01
SGD = OptimizerConfig(name="SGD", args={"lr": RATE, "momentum": 0.9, "weight_decay": DECAY})
ADAM = OptimizerConfig(name="AdamW", args={"lr": 0.02})


class Nesterov(torch.optim.Optimizer):
    """w(t+1) = look(t) - lr (1 - m) g, look(t) = w(t) + m (w(t) - w(t-1)): parameters are look."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": RATE})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for look in group["params"]:
                state = self.state[look]
                old = state.get("w", look.clone())
                gradient = look.grad + DECAY * look
                new = look - group["lr"] * (1 - MOMENTUM) * gradient
                state["w"] = new
                look.copy_(new + MOMENTUM * (new - old))


class LookingAhead(torch.optim.Optimizer):
    """look(t+1) = look(t) - lr (m u + (1 - m) g), u = m u + (1 - m) g; for a rate that changes."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": RATE})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for look in group["params"]:
                gradient = look.grad + DECAY * look
                before = self.state[look].get("u", torch.zeros_like(look))
                u = self.state[look]["u"] = MOMENTUM * before + (1 - MOMENTUM) * gradient
                look.sub_(group["lr"] * (MOMENTUM * u + (1 - MOMENTUM) * gradient))


class Nadam(torch.optim.Optimizer):
    """The formulas of runtime/optim/late_gradients.py, products of the momenta written out."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for w in group["params"]:
                state = self.state[w]
                t = state["t"] = state.get("t", 0) + 1
                zero = torch.zeros_like(w)
                u = MOMENTUM * state.get("u", zero) + (1 - MOMENTUM) * w.grad
                v = 0.999 * state.get("v", zero) + 0.001 * w.grad**2
                mu = [MOMENTUM * (1 - 0.5 * 0.96 ** (i * 0.004)) for i in range(t + 2)]
                # torch keeps this product in single precision, whatever the parameters have.
                product = state["product"] = state.get("product", torch.ones(())) * mu[t]
                now = product.item()
                n = mu[t + 1] * u / (1 - now * mu[t + 1]) + (1 - mu[t]) * w.grad / (1 - now)
                w.mul_(1 - group["lr"] * 0.01)
                w.sub_(group["lr"] * n / ((v / (1 - 0.999**t)).sqrt() + 1e-8))
                state["u"], state["v"] = u, v


def torch_optimizer(config: OptimizerConfig) -> Callable[[list[nn.Parameter]], Any]:
    return lambda parameters: getattr(torch.optim, config.name)(parameters, **config.args)


BIASES = GroupConfig(match=("*.bias",), args={"lr": 0.05, "weight_decay": 0.0})


def with_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    biases = [parameter for parameter in parameters if parameter.dim() == 1]
    others = [parameter for parameter in parameters if parameter.dim() > 1]
    return torch.optim.SGD([{"params": biases, **BIASES.args}, {"params": others}], **SGD.args)


CASES: dict[str, tuple[OptimizerConfig, dict[str, Any], Callable[[list[nn.Parameter]], Any]]] = {
    "rate": (SGD, {"rate_correction": 9}, torch_optimizer(SGD)),
    "prediction": (SGD, {"weight_prediction": True}, torch_optimizer(SGD)),
    "prediction-adam": (ADAM, {"weight_prediction": True}, torch_optimizer(ADAM)),
    "nesterov": (SGD, {"nesterov": MOMENTUM}, Nesterov),
    "nadam": (ADAM, {"nesterov": MOMENTUM}, Nadam),
    "groups": (
        SGD.model_copy(update={"groups": (BIASES,)}),
        {"rate_correction": 9, "weight_prediction": True},
        with_groups,
    ),
    "all": (
        SGD,
        {"rate_correction": 5, "weight_prediction": True, "nesterov": MOMENTUM},
        LookingAhead,
    ),
}


FEEDBACK: dict[str, tuple[OptimizerConfig, dict[str, Any], Callable[[list[nn.Parameter]], Any]]] = {
    "feedback": (SGD, {"error_feedback": True}, torch_optimizer(SGD)),
    "half": (ADAM, {"error_feedback": 0.5, "rate_correction": 9}, torch_optimizer(ADAM)),
}

PLAIN = {"plain": (SGD, dict[str, Any](), torch_optimizer(SGD))}
"""Late gradients as they are."""


def job_for(case: str, replicas: tuple[int, ...], dtype: str, run: Path, **changes: Any) -> Job:
    optimizer, asynchronous, _ = (CASES | FEEDBACK | PLAIN)[case]
    config = RunConfig(
        format="pipedream-run/1",
        model=Factory(source="small_models:Chain"),
        data=DataFactory(source="small_models:regression"),
        loss="mse_loss",
        optimizer=optimizer,
        asynchronous=AsynchronousConfig(**asynchronous),
        batch_size=4,
        microbatches=MICROBATCHES,
        seed=3,
        dtype=dtype,  # type: ignore[arg-type]
    )
    captured = capture(small_models.Chain(), (torch.randn(4, 6),))
    plan = chain_plan(captured, replicas)
    return Job(plan, config, SUPPORT, run, **{"epochs": EPOCHS} | changes)


class Letters(nn.Sequential):
    """Some layers of Chain, under the names they have there."""

    def __init__(self, model: nn.Module, letters: str) -> None:
        super().__init__()
        for letter in letters:
            self.add_module(letter, model.get_submodule(letter))


def serial_loop(serial: ModuleType, job: Job, case: str) -> Any:
    """The reference of the job, at its beginning."""
    config = job.config
    torch.manual_seed(config.seed)
    model = small_models.Chain().to(getattr(torch, config.dtype))
    letters = ["a", "b", "c"] if len(job.plan.replicas) == 3 else ["a", "bc"]
    names = ["x", *letters[1:], "y"]
    return serial.Serial(
        [
            serial.Stage(Letters(model, held), (names[stage],), (names[stage + 1],))
            for stage, held in enumerate(letters)
        ],
        (CASES | FEEDBACK | PLAIN)[case][2],
        lambda values, target: nn.functional.mse_loss(values["y"], target),
        job.schedule,
        job.plan.replicas,
        MICROBATCHES,
        predict=config.asynchronous.weight_prediction,
        rate_correction=config.asynchronous.rate_correction,
        feedback=float(config.asynchronous.error_feedback),
    )


def minibatches(serial: ModuleType, job: Job, number: int) -> list[Any]:
    """Those of one epoch."""
    epoch = Epoch(small_models.regression()[0], job.config, number, torch.device("cpu"))
    batches = [epoch.batch(index) for index in range(len(epoch))]
    return [serial.Minibatch({"x": batch.inputs[0]}, batch.target) for batch in batches]


def reference(serial: ModuleType, job: Job, case: str) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and the weights of the serial loop."""
    loop = serial_loop(serial, job, case)
    found: list[float] = []
    for number in range(1, job.epochs + 1):
        found += loop.epoch(minibatches(serial, job, number))
    return found, loop.weights


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "runs"),
    [
        ((1, 1, 1), [(case, "float64") for case in CASES]),
        ((3, 2), [*((case, "float32") for case in CASES), ("all", "float64")]),
    ],
    ids=["chain", "replicas"],
)
def test_a_run_is_that_of_the_serial_reference(
    replicas: tuple[int, ...], runs: list[tuple[str, str]], serial: ModuleType, tmp_path: Path
) -> None:
    jobs = {
        (case, dtype): job_for(case, replicas, dtype, tmp_path / f"{case}-{dtype}")
        for case, dtype in runs
    }
    run_jobs(list(jobs.values()))
    for (case, dtype), job in jobs.items():
        expected, ends = reference(serial, job, case)
        near = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
        assert losses(job) == pytest.approx(expected, rel=TOLERANCE[dtype]), (case, dtype)
        for name, tensor in weights(job).items():
            torch.testing.assert_close(tensor, ends[name], **near, msg=f"{case} {dtype} {name}")


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("replicas", [(3, 2), (1, 1, 1)], ids=["replicas", "chain"])
def test_updates_that_were_late_are_made_good(
    replicas: tuple[int, ...], serial: ModuleType, tmp_path: Path
) -> None:
    runs = [(case, s) for case in FEEDBACK for s in ("weight-stashing", "vertical-sync")]
    jobs = {
        (case, schedule): job_for(
            case, replicas, "float64", tmp_path / f"{case}-{schedule}", schedule=schedule
        )
        for case, schedule in [*runs, ("feedback", "2bw")]
    }
    run_jobs(list(jobs.values()))
    for (case, schedule), job in jobs.items():
        expected, ends = reference(serial, job, case)
        assert losses(job) == pytest.approx(expected, rel=1e-12), (case, schedule)
        for name, tensor in weights(job).items():
            torch.testing.assert_close(tensor, ends[name], rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("case", ["all", "feedback"])
def test_a_run_that_was_resumed_goes_on_as_if_it_had_not_been_stopped(
    case: str, tmp_path: Path
) -> None:
    """Checkpoints keep the last step, and how many updates the rate has been corrected for; at a
    checkpoint nothing is left to be made good.
    """
    whole = job_for(case, (2, 1), "float64", tmp_path / "whole")
    first = job_for(case, (2, 1), "float64", tmp_path / "halves", epochs=1)
    second = job_for(case, (2, 1), "float64", tmp_path / "halves", resume=True)
    run_jobs([whole, first, second])
    assert losses(second) == losses(whole)
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(second)[name]), name


def test_the_rate_grows_from_that_over_the_delay_to_the_whole() -> None:
    assert [slowing(4, k, updates=2) for k in range(4)] == [4.0, 2.0, 1.0, 1.0]
    assert slowing(0, 0, updates=2) == 1.0, "the last stage has nothing to be careful about"


def test_what_is_left_open_is_as_in_the_optimizer_that_was_named() -> None:
    form = nesterov_form(OptimizerConfig(name="AdamW", args={}), 0.99)
    assert form.name == "NAdam"
    assert form.args == {
        "lr": 1e-3,
        "weight_decay": 0.01,
        "betas": [0.99, 0.999],
        "decoupled_weight_decay": True,
    }
    assert nesterov_form(OptimizerConfig(name="Adam", args={}), 0.99).args["weight_decay"] == 0.0


def test_the_form_of_a_group_is_that_of_the_optimizer() -> None:
    group = GroupConfig(match=("*",), args={"betas": [0.5, 0.99], "weight_decay": 0.0})
    (form,) = nesterov_form(
        OptimizerConfig(name="AdamW", args={"lr": 0.3}, groups=(group,)), 0.99
    ).groups
    assert form.args == {
        "lr": 0.3,
        "weight_decay": 0.0,
        "betas": [0.99, 0.99],
        "decoupled_weight_decay": True,
    }


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (OptimizerConfig(name="RMSprop"), "of SGD, Adam and AdamW, and the optimizer is RMSprop"),
        (OptimizerConfig(name="Adam", args={"amsgrad": True}), "it has no amsgrad"),
        (OptimizerConfig(name="SGD", args={"dampening": 0.1}), "it has no dampening"),
        (
            OptimizerConfig(name="AdamW", args={"betas": [0.9, 0.95]}),
            "longer than the mean of their squares",  # diverged at each of three rates
        ),
        (OptimizerConfig(name="AdamW", args={"betas": [0.9]}), "optimizer AdamW .*betas"),
        (OptimizerConfig(name="Adam", args={"betas": 0.9}), "optimizer Adam .*betas"),
        (OptimizerConfig(name="Adam", args={"lr": "0.1"}), "optimizer Adam .*lr"),
        (
            OptimizerConfig(groups=(GroupConfig(match=("*",), name="Adam"),)),
            "remove `name` from the optimizer's groups",
        ),
        (
            OptimizerConfig(groups=(GroupConfig(match=("*",), args={"dampening": 0.1}),)),
            "it has no dampening",
        ),
    ],
)
def test_optimizers_without_a_nesterov_form_are_told(config: OptimizerConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        nesterov_form(config, 0.99)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("schedule", ["flush", "2bw"])
def test_other_schedules_have_nothing_to_correct(case: str, schedule: str, tmp_path: Path) -> None:
    job = job_for(case, (1, 1, 1), "float32", tmp_path, schedule=schedule)
    with pytest.raises(UserError, match=f"for weight-stashing, and the schedule is {schedule}"):
        job.check_asynchronous()


@pytest.mark.thorough
@pytest.mark.slow
def test_late_gradients_go_on_under_another_plan(serial: ModuleType, tmp_path: Path) -> None:
    """The pipeline was drained at the checkpoint: from there weights are as late as the new plan
    makes them, and momentum goes on.
    """
    first = job_for("plain", (1, 1, 1), "float64", tmp_path / "run", epochs=1)
    second = job_for("plain", (2, 1), "float64", tmp_path / "run", resume=True)
    run_jobs([first, second])
    before, after = (serial_loop(serial, job, "plain") for job in (first, second))
    expected = before.epoch(minibatches(serial, first, 1))
    take_over(before, after)
    expected += after.epoch(minibatches(serial, first, 2))
    assert losses(second) == pytest.approx(expected, rel=1e-12)
    for name, tensor in weights(second).items():
        torch.testing.assert_close(tensor, after.weights[name], rtol=1e-12, atol=1e-12)


def take_over(before: Any, after: Any) -> None:
    """Weights and momentum, parameter by parameter."""
    old = {
        name: (parameter, held.optimizer.state[parameter])
        for held in before.stages
        for name, parameter in held.parameters.items()
    }
    for held in after.stages:
        for name, parameter in held.parameters.items():
            parameter.data.copy_(old[name][0])
            held.optimizer.state[parameter] = dict(old[name][1])
        held.versions[:] = [{n: p.detach().clone() for n, p in held.parameters.items()}]
