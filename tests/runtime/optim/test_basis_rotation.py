"""Adam in rotated bases: the optimizer against its formula, and runs of several processes.

The reference is written from the formula in numpy: M in the bases of the weights, where the code
keeps it in its own; bases by numpy's eigh and qr. Gradients of a first update have full rank in it,
since bases are arbitrary where eigenvalues are equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
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
    BasisRotationConfig,
    DataFactory,
    Factory,
    GroupConfig,
    OptimizerConfig,
    RunConfig,
)
from pipedream.runtime.optim.basis_rotation import RotatedAdam
from pipedream.runtime.optim.late_gradients import (
    check_corrections,
    optimizer_form,
    rotated_form,
    turns_every,
)
from pipedream.runtime.optim.optimizers import make_optimizer, restore_state, state_tensors
from pipedream.runtime.run.job import Job
from tests.runtime.optim.test_late_gradients import Letters, minibatches, take_over

SUPPORT = Path(small_models.__file__).parent
EPOCHS, MICROBATCHES, EVERY, RATE = 2, 2, 2, 0.02
PLAIN = OptimizerConfig(name="AdamW", args={"lr": RATE})
DEFAULTS = BasisRotationConfig()


class Formula(torch.optim.Optimizer):
    """The formula of runtime/optim/basis_rotation.py, with numpy."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        lr: float = RATE,
        every: int = EVERY,
        widest: int = 4096,
        weight_decay: float = 0.01,
        decoupled: bool = True,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "every": every})
        self.widest, self.decay, self.decoupled = widest, weight_decay, decoupled

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for w in group["params"]:
                if w.grad is not None:
                    state = self.state[w]
                    new = self._updated(w.numpy().copy(), w.grad.numpy(), state, group)
                    w.copy_(torch.from_numpy(new))

    def _updated(self, w: Any, g: Any, state: dict[str, Any], group: dict[str, Any]) -> Any:
        state["k"] = k = state.get("k", 0) + 1
        lr = group["lr"]
        if self.decoupled:
            w = (1 - lr * self.decay) * w
        else:
            g = g + self.decay * w
        rotated = [w.ndim == 2 and 1 not in w.shape and size <= self.widest for size in w.shape]
        if not any(rotated):
            state["m"] = m = 0.9 * state.get("m", 0.0) + 0.1 * g
            state["v"] = v = 0.999 * state.get("v", 0.0) + 0.001 * g**2
            return w - lr * m / (1 - 0.9**k) / (np.sqrt(v / (1 - 0.999**k)) + 1e-8)
        sides = [(i, "LR"[i], "UV"[i]) for i in (0, 1) if rotated[i]]
        squares = {"L": g @ g.T, "R": g.T @ g}
        if k == 1:
            for _, name, basis in sides:
                state[name] = 0.001 * squares[name]
                state[basis] = np.linalg.eigh(state[name])[1][:, ::-1]
            return w - lr * g / (np.abs(g) + 1e-8)
        t = k - 1
        u = state.get("U", np.eye(w.shape[0]))
        v = state.get("V", np.eye(w.shape[1]))
        state["m"] = m = 0.9 * state.get("m", 0.0) + 0.1 * g
        state["v"] = second = 0.999 * state.get("v", 0.0) + 0.001 * (u.T @ g @ v) ** 2
        root = np.sqrt(second / (1 - 0.999**t))
        e = 32 * np.finfo(np.float64).eps * math.sqrt((root**2).sum())
        step = u @ (u.T @ m @ v / (1 - 0.9**t) / (root + 1e-8 + e)) @ v.T
        for _, name, _ in sides:
            state[name] = 0.999 * state[name] + 0.001 * squares[name]
        if t % group["every"] == 0:
            for side, name, basis in sides:
                old = state[basis]
                order = np.argsort(-np.einsum("ij,ik,kj->j", old, state[name], old))
                state[basis] = np.linalg.qr(state[name] @ old[:, order])[0]
                state["v"] = np.take(state["v"], order, axis=side)
        return w - lr * step


def steps(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], count: int) -> None:
    """So many, along random gradients whose size varies over rows, columns and time."""
    generator = torch.Generator().manual_seed(1)
    for k in range(count):
        for parameter in parameters:
            gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            for side, size in enumerate(parameter.shape):
                scale = (torch.arange(1, size + 1, dtype=torch.float64) / size).roll(k // 5)
                gradient *= scale.view([-1 if n == side else 1 for n in range(parameter.dim())])
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()


@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
def test_the_optimizer_is_its_formula(decoupled: bool) -> None:
    options = {"lr": 0.02, "every": 3, "widest": 6, "weight_decay": 0.1, "decoupled": decoupled}
    shapes = [(6, 6), (5, 6), (4, 9), (9, 4), (1, 5), (7, 7), (5,)]
    torch.manual_seed(0)
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    ours, theirs = ([nn.Parameter(t.clone()) for t in tensors] for _ in range(2))
    steps(RotatedAdam(ours, **options), ours, 40)  # type: ignore[arg-type]
    steps(Formula(theirs, **options), theirs, 40)  # type: ignore[arg-type]
    for one, other, start in zip(ours, theirs, tensors, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, msg=str(start.shape))


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_without_a_matrix_it_is_that_of_torch(name: str) -> None:
    form = rotated_form(OptimizerConfig(name=name, args={}), DEFAULTS)
    ours, theirs = (nn.Parameter(torch.ones(3, 2, 2)) for _ in range(2))
    steps(make_optimizer(form, {"w": ours}), [ours], 5)
    steps(getattr(torch.optim, name)([theirs], foreach=False), [theirs], 5)
    assert torch.equal(ours, theirs)


def test_gradients_of_rank_one_move_weights_along_themselves_alone() -> None:
    """In other directions there are rounding errors, which Adam would make steps of full length."""
    torch.manual_seed(0)
    left, right = (nn.functional.normalize(torch.randn(64), dim=0) for _ in range(2))
    w = nn.Parameter(torch.zeros(64, 64))
    optimizer = RotatedAdam([w], lr=0.01)
    after = []
    for k in range(30):
        w.grad = (1 + 0.3 * math.sin(k)) * torch.outer(left, right)
        optimizer.step()
        after.append(w.detach().clone())
    moved = after[-1] - after[0]
    along = left @ moved @ right
    assert -0.3 < along < -0.2, "29 steps of about the rate"
    assert (moved - along * torch.outer(left, right)).norm() < 0.1 * abs(along)


def test_zero_gradients_leave_weights_where_they_are() -> None:
    w = nn.Parameter(torch.ones(6, 4))
    optimizer = RotatedAdam([w], every=1)
    for _ in range(3):
        w.grad = torch.zeros_like(w)
        optimizer.step()
    assert torch.equal(w, torch.ones(6, 4))


@pytest.mark.parametrize("when", [0, 3])
@pytest.mark.parametrize("what", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_shows_in_the_weights(when: int, what: float) -> None:
    """And not in an error of a decomposition, which would hide it from the run's own check."""
    w = nn.Parameter(torch.ones(6, 4))
    optimizer = RotatedAdam([w], every=1)
    for k in range(6):
        w.grad = torch.randn(6, 4)
        if k == when:
            w.grad[2, 1] = what
        optimizer.step()
    assert w.isnan().any()


def test_bfloat16_weights_have_moments_in_float32() -> None:
    torch.manual_seed(0)
    start = torch.randn(8, 6).bfloat16()
    half, single = nn.Parameter(start.clone()), nn.Parameter(start.float())
    optimizer = RotatedAdam([half], lr=0.02)
    steps(optimizer, [half], 20)
    steps(RotatedAdam([single], lr=0.02), [single], 20)
    state = optimizer.state[half]
    assert {state[name].dtype for name in ("exp_avg", "exp_avg_sq", "left", "right_basis")} == {
        torch.float32
    }
    torch.testing.assert_close(half.float(), single, rtol=0.02, atol=0.05)


def test_what_has_no_gradient_stays_and_complex_weights_are_refused() -> None:
    w = nn.Parameter(torch.ones(3, 3))
    optimizer = RotatedAdam([w])
    optimizer.step()
    assert not optimizer.state[w]
    form = rotated_form(PLAIN, DEFAULTS)
    with pytest.raises(UserError, match="complex parameters are not rotated"):
        make_optimizer(form, {"w": nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_state_goes_on_bit_for_bit(dtype: torch.dtype) -> None:
    """With all kinds of state, and their types, in the middle between two turns."""
    torch.manual_seed(0)
    start = {"w": torch.randn(33, 20), "wide": torch.randn(50, 7), "b": torch.randn(20)}
    one = {name: nn.Parameter(tensor.to(dtype)) for name, tensor in start.items()}
    form = rotated_form(PLAIN, BasisRotationConfig(every=3, widest=40))
    optimizer = make_optimizer(form, one)
    steps(optimizer, list(one.values()), 8)
    other = {name: nn.Parameter(tensor.detach().clone()) for name, tensor in one.items()}
    saved = {key: each.clone().contiguous() for key, each in state_tensors(optimizer, one).items()}
    again = make_optimizer(form, other)
    restore_state(again, other, saved)
    for each, parameters in ((optimizer, one), (again, other)):
        steps(each, list(parameters.values()), 8)
    for name, parameter in one.items():
        assert torch.equal(parameter, other[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (9, 9), (1, 5), (7,), (2, 3, 4)])
def test_plans_count_what_it_keeps(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    w = nn.Parameter(torch.ones(shape, dtype=dtype))
    rotation = BasisRotationConfig(widest=8)
    optimizer = RotatedAdam([w], **rotation.model_dump())
    w.grad = torch.ones_like(w)
    optimizer.step()
    kept = sum(each.nbytes for name, each in optimizer.state[w].items() if name != "step")
    assert kept == 2 * w.nbytes + rotation.extra_bytes(shape, w.itemsize)


def test_stages_turn_their_bases_as_often_as_their_gradients_are_late() -> None:
    assert [turns_every(10, delay, 3) for delay in (3, 2, 1, 0)] == [10, 14, 20, 40]
    assert turns_every(10, 0, 0) == 10


def test_what_is_left_open_is_as_in_the_optimizer_that_was_named() -> None:
    group = GroupConfig(match=("*",), args={"betas": [0.5, 0.9], "weight_decay": 0.0})
    args = {"lr": 0.3, "fused": True, "amsgrad": False}
    form = rotated_form(OptimizerConfig(name="AdamW", args=args, groups=(group,)), DEFAULTS)
    rest = {"lr": 0.3, "decoupled": True, "every": 10, "widest": 4096}
    assert form.args == rest | {"weight_decay": 0.01}
    assert form.groups[0].args == rest | {"weight_decay": 0.0, "betas": [0.5, 0.9]}
    adam = rotated_form(OptimizerConfig(name="Adam", args={}), DEFAULTS).args
    assert (adam["lr"], adam["weight_decay"], adam["decoupled"]) == (1e-3, 0.0, False)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (OptimizerConfig(name="SGD"), "a form of Adam and AdamW, and the optimizer is SGD"),
        (OptimizerConfig(name="Adam", args={"amsgrad": True}), "it has no amsgrad"),
        (OptimizerConfig(name="Adam", args={"maximize": True}), "it has no maximize"),
        (
            OptimizerConfig(name="Adam", groups=(GroupConfig(match=("*",), name="SGD"),)),
            "remove `name` from the optimizer's groups",
        ),
        (OptimizerConfig(name="RotatedAdam"), "write Adam or AdamW and asynchronous"),
    ],
)
def test_optimizers_without_such_a_form_are_told(config: OptimizerConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        optimizer_form(config, AsynchronousConfig(basis_rotation=DEFAULTS))


@pytest.mark.parametrize("other", [{"nesterov": 0.9}, {"weight_prediction": True}])
def test_other_corrections_that_do_not_go_with_it_are_refused(other: dict[str, Any]) -> None:
    wanted = AsynchronousConfig(basis_rotation=True, **other)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=f"{next(iter(other))} and basis_rotation are not"):
        check_corrections(wanted, "weight-stashing", "1f1b")
    with pytest.raises(UserError, match="and the schedule is flush"):
        check_corrections(AsynchronousConfig(basis_rotation=DEFAULTS), "flush", "1f1b")


def test_a_parameter_that_is_divided_is_refused() -> None:
    form = rotated_form(PLAIN, DEFAULTS)
    with pytest.raises(UserError, match="basis_rotation has to see the whole of w, which the plan"):
        make_optimizer(form, {"w": nn.Parameter(torch.ones(2, 2))}, is_divided=lambda name: True)


CASES: dict[str, dict[str, Any]] = {
    "rotated": {"basis_rotation": {"every": EVERY}},
    "all": {"basis_rotation": {"every": EVERY}, "error_feedback": True, "rate_correction": 9},
}


def job_for(case: str, replicas: tuple[int, ...], run: Path, **changes: Any) -> Job:
    config = RunConfig(
        format="pipedream-run/1",
        model=Factory(source="small_models:Chain"),
        data=DataFactory(source="small_models:regression"),
        loss="mse_loss",
        optimizer=PLAIN,
        asynchronous=AsynchronousConfig(**CASES[case]),
        batch_size=8,
        microbatches=MICROBATCHES,
        seed=3,
        dtype="float64",
    )
    captured = capture(small_models.Chain(), (torch.randn(8, 6),))
    plan = chain_plan(captured, replicas)
    return Job(plan, config, SUPPORT, run, **{"epochs": EPOCHS} | changes)


def serial_loop(serial: ModuleType, job: Job) -> Any:
    """The reference of the job, at its beginning, whose stages turn their bases by their delays."""
    torch.manual_seed(job.config.seed)
    model = small_models.Chain().double()
    letters = ["a", "b", "c"] if len(job.plan.replicas) == 3 else ["a", "bc"]
    names = ["x", *letters[1:], "y"]
    loop = serial.Serial(
        [
            serial.Stage(Letters(model, held), (names[stage],), (names[stage + 1],))
            for stage, held in enumerate(letters)
        ],
        Formula,
        lambda values, target: nn.functional.mse_loss(values["y"], target),
        job.schedule,
        job.plan.replicas,
        MICROBATCHES,
        rate_correction=job.config.asynchronous.rate_correction,
        feedback=float(job.config.asynchronous.error_feedback),
    )
    delays = {
        ((1, 1, 1), "weight-stashing"): (2, 1, 0),
        ((1, 1, 1), "vertical-sync"): (2, 2, 2),
        ((1, 1, 1), "2bw"): (1, 1, 1),
        ((3, 2), "weight-stashing"): (2, 0),
        ((3, 2), "vertical-sync"): (2, 3),
        ((3, 2), "2bw"): (1, 1),
        ((2, 1), "weight-stashing"): (1, 0),
    }[job.plan.replicas, job.schedule]
    for held, delay in zip(loop.stages, delays, strict=True):
        turns = math.ceil(EVERY * (max(delays) + 1) / (delay + 1))
        held.optimizer.param_groups[0]["every"] = turns
    return loop


def assert_equal(job: Job, losses_of: list[float], ends: dict[str, Tensor], case: object) -> None:
    assert losses(job) == pytest.approx(losses_of, rel=1e-12), case
    for name, tensor in weights(job).items():
        torch.testing.assert_close(tensor, ends[name], rtol=1e-12, atol=1e-12, msg=f"{case} {name}")


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("replicas", [(3, 2), (1, 1, 1)], ids=["replicas", "chain"])
def test_a_run_is_that_of_the_serial_reference(
    replicas: tuple[int, ...], serial: ModuleType, tmp_path: Path
) -> None:
    schedules = ("weight-stashing", "2bw", "vertical-sync")
    runs = [("all", "weight-stashing"), *(("rotated", each) for each in schedules)]
    jobs = {
        (case, schedule): job_for(
            case, replicas, tmp_path / f"{case}-{schedule}", schedule=schedule
        )
        for case, schedule in runs
    }
    run_jobs(list(jobs.values()))
    for case, job in jobs.items():
        loop = serial_loop(serial, job)
        expected: list[float] = []
        for number in range(1, EPOCHS + 1):
            expected += loop.epoch(minibatches(serial, job, number))
        assert_equal(job, expected, loop.weights, case)


@pytest.mark.slow
def test_a_run_that_was_resumed_goes_on_as_if_it_had_not_been_stopped(tmp_path: Path) -> None:
    whole = job_for("all", (2, 1), tmp_path / "whole")
    first = job_for("all", (2, 1), tmp_path / "halves", epochs=1)
    second = job_for("all", (2, 1), tmp_path / "halves", resume=True)
    run_jobs([whole, first, second])
    assert losses(second) == losses(whole)
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(second)[name]), name


@pytest.mark.slow
def test_bases_go_on_under_another_plan(serial: ModuleType, tmp_path: Path) -> None:
    first = job_for("rotated", (1, 1, 1), tmp_path / "run", epochs=1)
    second = job_for("rotated", (2, 1), tmp_path / "run", resume=True)
    run_jobs([first, second])
    before, after = (serial_loop(serial, job) for job in (first, second))
    expected = before.epoch(minibatches(serial, first, 1))
    take_over(before, after)
    expected += after.epoch(minibatches(serial, first, 2))
    assert_equal(second, expected, after.weights, "another plan")
