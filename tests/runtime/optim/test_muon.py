"""Muon for the weights of hidden layers, AdamW for the rest: who learns what, and runs that do so.

The references are plain loops with torch's own Muon and AdamW, their parameters divided by hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR
from training import losses, run_jobs, weights

from pipedream.capture.errors.user_code import import_torchvision
from pipedream.capture.export import capture
from pipedream.capture.programs.parameter_roles import Role, roles
from pipedream.capture.sources.load import load_data
from pipedream.graph.errors import UserError
from pipedream.graph.run_config import (
    AsynchronousConfig,
    GroupConfig,
    OptimizerConfig,
    SchedulerConfig,
)
from pipedream.runtime.checkpoint.dcp import Folder
from pipedream.runtime.checkpoint.export import export
from pipedream.runtime.checkpoint.files import latest, load_optimizer
from pipedream.runtime.data.reader import Epoch
from pipedream.runtime.optim.muon import check_state, roles_by_state, who_learns, with_others
from pipedream.runtime.optim.optimizers import groups, make_optimizer
from pipedream.runtime.run.job import Job
from tests.runtime.engine.test_semantics import SUPPORT, chain_stages
from tests.runtime.test_options import PARTS, assert_same, job_for, plain_model, rounds

MUON_ARGS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
ADAM_ARGS: dict[str, Any] = {"lr": 0.005, "weight_decay": 0.3}
MUON = OptimizerConfig(name="Muon", args=MUON_ARGS, others=ADAM_ARGS)
SCHEDULES = ("flush", "gpipe", "2bw", "weight-stashing", "vertical-sync")


class ByHand(torch.optim.Optimizer):
    """torch's Muon for these matrices, and AdamW for the others."""

    def __init__(self, matrices: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        self.parts = [torch.optim.AdamW(others, **ADAM_ARGS)]
        if matrices:
            self.parts.append(torch.optim.Muon(matrices, **MUON_ARGS))
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Any = None) -> None:
        for part in self.parts:
            part.step()


def divided(parameters: Sequence[Tensor], has_output: bool) -> ByHand:
    """Those of a stage of Chain, whose last matrix is the output in the last stage."""
    matrices = [each for each in parameters if each.dim() == 2]
    matrices = matrices[:-1] if has_output else matrices
    others = [each for each in parameters if all(each is not matrix for matrix in matrices)]
    return ByHand(matrices, others)


def serially(serial: ModuleType, job: Job, parts: Sequence[str]) -> tuple[list[float], Any]:
    """The losses of the serial loop, and the loop."""
    config, seen = job.config, iter(range(len(parts)))
    loop = serial.Serial(
        chain_stages(serial, plain_model(config), parts),
        lambda parameters: divided(parameters, next(seen) == len(parts) - 1),
        lambda values, target: F.mse_loss(values["y"], target),
        job.schedule,
        job.plan.replicas,
        config.microbatches,
        feedback=float(config.asynchronous.error_feedback),
    )
    data, _ = load_data(config, SUPPORT)
    expected: list[float] = []
    for number in range(1, job.epochs + 1):
        epoch = Epoch(data, config, number, torch.device("cpu"))
        batches = [epoch.batch(index) for index in range(len(epoch))]
        expected += loop.epoch([serial.Minibatch({"x": b.inputs[0]}, b.target) for b in batches])
    return expected, loop


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("replicas", [(3, 2), (1, 1, 1)], ids=["replicas", "chain"])
def test_each_schedule_is_that_of_the_serial_reference(
    replicas: tuple[int, ...], serial: ModuleType, tmp_path: Path
) -> None:
    """To rounding in float64, though Muon orthogonalizes in bfloat16: equal gradients to 1e-16
    round to the same there, but for one in 1e13.
    """
    made_good = {"asynchronous": AsynchronousConfig(error_feedback=True)}
    jobs = [
        job_for(tmp_path / name / str(number), replicas, name, optimizer=MUON, **changes)
        for number, changes in enumerate([{}, made_good])
        for name in SCHEDULES[2 * number :]
    ]
    run_jobs(jobs)
    parts = PARTS if len(replicas) == 3 else ("a", "bc")
    for job in jobs:
        expected, loop = serially(serial, job, parts)
        assert losses(job) == pytest.approx(expected, rel=1e-12), job.schedule
        for name, tensor in loop.weights.items():
            torch.testing.assert_close(weights(job)[name], tensor, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_the_rate_falls_and_the_norm_is_clipped_for_both(tmp_path: Path) -> None:
    falling = SchedulerConfig(name="ExponentialLR", args={"gamma": 0.8}, every="update")
    job = job_for(tmp_path, (2, 1), optimizer=MUON, clip_norm=0.05, scheduler=falling)
    run_jobs([job])
    model = plain_model(job.config)
    optimizer = divided(list(model.parameters()), True)
    rates = [ExponentialLR(part, 0.8) for part in optimizer.parts]
    expected, norms = [], []
    for part in rounds(job.config):
        found = [F.mse_loss(model(x), target) for x, target in part]
        expected += [loss.item() for loss in found]
        model.zero_grad()
        torch.stack(found).mean().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
        optimizer.step()
        for rate in rates:
            rate.step()
    assert max(norms) > 0.05, "nothing is clipped"
    assert_same(job, expected, model, 1e-12)


def state_of(job: Job) -> dict[str, Tensor]:
    path = latest(job.checkpoints)
    assert path is not None
    return load_optimizer(path, weights(job))


@pytest.mark.slow
def test_a_run_goes_on_as_if_it_had_not_ended(tmp_path: Path) -> None:
    """Bit for bit, and under another plan to rounding; the exported optimizer is divided alike."""
    one = {"optimizer": MUON}
    stashed, whole = (
        job_for(tmp_path / name, (1, 1, 1), name, **one)  # type: ignore[arg-type]
        for name in ("weight-stashing", "flush")
    )
    halves = [replace(job, run=job.run / "halves", epochs=1) for job in (stashed, whole)]
    on = [replace(job, epochs=2, resume=True) for job in halves]
    on[1] = replace(on[1], plan=job_for(tmp_path / "other", (3, 2), **one).plan)
    run_jobs([stashed, whole, *halves, *on])
    for job, again, bound in zip((stashed, whole), on, (0.0, 1e-12), strict=True):
        near = {"rtol": bound, "atol": bound}
        torch.testing.assert_close(weights(again), weights(job), **near)
        torch.testing.assert_close(state_of(again), state_of(job), **near)
    path = latest(stashed.checkpoints)
    assert path is not None
    export(stashed, path, tmp_path / "whole.dcp")
    exported = Folder(tmp_path / "whole.dcp").load_optimizer(weights(stashed))
    torch.testing.assert_close(exported, state_of(stashed), rtol=0, atol=0)
    states = {key for key in state_of(stashed) if key.startswith(("b.", "c."))}
    adams = {
        f"{n}/{s}"
        for n in ("b.linear.bias", "c.linear.bias", "c.linear.weight")
        for s in ("step", "exp_avg", "exp_avg_sq")
    }
    assert states == adams | {"b.linear.weight/momentum_buffer"}


class Gates(nn.Module):
    """A table, a recurrent layer, a matrix that is added, one in parts, a weight by its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)  # named and made first, read last
        self.names = nn.EmbeddingBag(9, 8)
        self.steps = nn.LSTM(8, 8, batch_first=True)
        self.places = nn.Parameter(torch.zeros(5, 8))
        self.parts = nn.Parameter(torch.randn(16, 8))
        self.phases = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.steps(self.names(x)[:, None] + self.places)
        query, key = self.parts.chunk(2)
        hidden = self.normed(hidden @ query.T + hidden @ key)
        return self.head((hidden.to(self.phases.dtype) @ self.phases).real.sum(1))


class Kernels(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
        )


def roles_of(model: nn.Module, *inputs: Tensor) -> dict[str, Role]:
    return roles(capture(model, inputs))


def test_roles_follow_from_operators() -> None:
    assert roles_of(Gates(), torch.zeros(2, 5, dtype=torch.int64)) == {
        "names.weight": Role.TABLE,
        "places": Role.OTHER_MATRIX,
        "steps.weight_ih_l0": Role.HIDDEN,
        "steps.weight_hh_l0": Role.HIDDEN,
        "steps.bias_ih_l0": Role.NO_MATRIX,
        "steps.bias_hh_l0": Role.NO_MATRIX,
        "parts": Role.HIDDEN,
        "normed.parametrizations.weight.original0": Role.OTHER_MATRIX,
        "normed.parametrizations.weight.original1": Role.OTHER_MATRIX,
        "phases": Role.NO_MATRIX,
        "head.weight": Role.OUTPUT,
        "head.bias": Role.NO_MATRIX,
    }


def test_a_transformer_with_a_tied_head() -> None:
    """Its kernels are (in, out), read by addmm; the table is read first and last."""
    import_torchvision()
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": 9, "n_positions": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False))
    found = roles_of(model, torch.zeros(2, 4, dtype=torch.int64))
    matrices = {
        name.removeprefix("transformer."): role for name, role in found.items() if role.is_matrix
    }
    layers = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    hidden = {f"h.{n}.{layer}.weight": Role.HIDDEN for n in (0, 1) for layer in layers}
    assert matrices == {"wte.weight": Role.TIED, "wpe.weight": Role.TABLE, **hidden}
    config = with_others(MUON, found)
    assert who_learns(config, found, found) == (
        "Muon for 8 matrices, AdamW for 20 others: transformer.wpe.weight (a table), "
        "transformer.wte.weight (a table and the output), 18 that are no matrices"
    )
    learned = {name: group.optimizer for group in groups(config, found) for name in group.members}
    assert learned["transformer.wte.weight"] == OptimizerConfig(name="AdamW", args=ADAM_ARGS)
    assert learned["transformer.h.1.mlp.c_fc.weight"] == OptimizerConfig(
        name="Muon", args=MUON_ARGS
    )


def test_a_model_of_kernels_has_nothing_for_muon() -> None:
    found = roles_of(Kernels(), torch.randn(2, 3, 4, 4))
    matrices = {name for name, role in found.items() if role.is_matrix}
    assert (matrices, found["4.weight"]) == ({"4.weight"}, Role.OUTPUT)
    with pytest.raises(UserError, match=r"^optimizer Muon: .* has none that learns: write AdamW$"):
        who_learns(with_others(MUON, found), found, found)


class Heads(nn.Module):
    """Two outputs of one trunk, and a convolution of it."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.kinds, self.boxes = nn.Linear(4, 3), nn.Linear(4, 2)
        self.before, self.mask = nn.Linear(4, 4), nn.Conv1d(1, 1, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.trunk(x).relu()
        return self.kinds(x), self.boxes(x), self.mask(self.before(x)[:, None])


def test_each_head_is_an_output() -> None:
    """One of two was learned by Muon; what a convolution reads is none."""
    found = roles_of(Heads(), torch.randn(2, 4))
    outputs = {name for name, role in found.items() if role is Role.OUTPUT}
    assert outputs == {"kinds.weight", "boxes.weight"}
    assert found["before.weight"] is found["trunk.weight"] is Role.HIDDEN


ROLES = {
    "table": Role.TABLE,
    "a.weight": Role.HIDDEN,
    "a.bias": Role.NO_MATRIX,
    "odd[0]": Role.NO_MATRIX,
    "head": Role.OUTPUT,
}


def divided_by(config: OptimizerConfig) -> list[tuple[str, dict[str, Any], set[str]]]:
    found = groups(with_others(config, ROLES), ROLES)
    return [(each.optimizer.name, each.optimizer.args, set(each.members)) for each in found]


def test_groups_of_the_user_come_first() -> None:
    claimed = (
        GroupConfig(match=("head",)),
        GroupConfig(match=("*.bias",), name="SGD", args={"lr": 1}),
    )
    assert divided_by(MUON.model_copy(update={"groups": claimed})) == [
        ("Muon", MUON_ARGS, {"head"}),
        ("SGD", {"lr": 1}, {"a.bias"}),
        ("AdamW", ADAM_ARGS, {"table", "odd[0]"}),
        ("Muon", MUON_ARGS, {"a.weight"}),
    ]


def test_groups_may_divide_all_by_hand() -> None:
    """As before there was a rule: what is left to Muon are matrices, the output among them."""
    claimed = GroupConfig(match=("*bias", "odd*", "table"), name="AdamW")
    config = OptimizerConfig(name="Muon", args={}, groups=(claimed,))
    assert divided_by(config) == [
        ("AdamW", {}, {"a.bias", "odd[0]", "table"}),
        ("Muon", {}, {"a.weight", "head"}),
    ]
    assert with_others(config.model_copy(update={"others": {}}), ROLES) != config


def test_a_group_for_biases_alone_gives_muon_neither_table_nor_output() -> None:
    """Where Muon's arguments say AdamW's, nothing has to be divided by hand."""
    claimed = GroupConfig(match=("*bias", "odd*"), name="AdamW")
    args = {"adjust_lr_fn": "match_rms_adamw"}
    config = OptimizerConfig(name="Muon", args=args, groups=(claimed,))
    assert [(name, members) for name, _, members in divided_by(config)] == [
        ("AdamW", {"a.bias", "odd[0]"}),
        ("AdamW", {"table", "head"}),
        ("Muon", {"a.weight"}),
    ]


@pytest.mark.parametrize(
    ("args", "others", "expected"),
    [
        ({}, None, {"lr": 1e-3, "weight_decay": 0.1}),
        ({"lr": 0.3, "weight_decay": 0.0}, None, {"lr": 0.3, "weight_decay": 0.0}),
        ({"lr": 0.3}, {"lr": 0.2, "eps": 1.0}, {"lr": 0.2, "weight_decay": 0.1, "eps": 1.0}),
    ],
)
def test_steps_as_long_as_those_of_adamw_have_its_rate(
    args: dict[str, Any], others: dict[str, Any] | None, expected: dict[str, Any]
) -> None:
    """Of Muon: torch's defaults are 1e-3 and 0.1, and AdamW's decay is another."""
    args = {"adjust_lr_fn": "match_rms_adamw", **args}
    (adam, _) = divided_by(OptimizerConfig(name="Muon", args=args, others=others))
    assert adam == ("AdamW", expected, {"table", "a.bias", "odd[0]", "head"})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, r"^optimizer Muon: .*, such as table: write others: \{lr: 0.001\} beside args, or .*"),
        ({"others": {"momentum": 1}}, r"^optimizer.others: AdamW \{'momentum': 1\}: TypeError: .*"),
    ],
)
def test_others_have_to_be_said_and_right(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        with_others(OptimizerConfig(name="Muon", args={"lr": 0.1}, **config), ROLES)
    assert "\n" not in str(raised.value)


def test_others_are_for_muon() -> None:
    with pytest.raises(ValueError, match=r"others: are for AdamW beside Muon, and SGD learns all"):
        OptimizerConfig(name="SGD", others={"lr": 1})


def test_what_another_optimizer_remembers_is_refused() -> None:
    """torch would begin with no momentum, and say nothing."""
    config, names = with_others(MUON, ROLES), list(ROLES)
    right = ["a.weight/momentum_buffer", "head/exp_avg", "head/step"]
    check_state(config, names, right, "--resume")
    momentum = GroupConfig(match=("head",), name="SGD", args={"momentum": 0.9})
    grouped = with_others(MUON.model_copy(update={"groups": (momentum,)}), ROLES)
    check_state(grouped, names, ["head/momentum_buffer"], "--resume")
    for wrong in ("a.weight/exp_avg", "head/momentum_buffer"):
        with pytest.raises(UserError, match=r"^--resume: (a.weight|head) was learned by .*"):
            check_state(config, names, [*right, wrong], "--resume")


def test_the_momentum_is_not_what_torch_divides() -> None:
    """torch 2.13 normalizes in place: the buffer itself, where that is bfloat16 already."""
    weight = {"w": nn.Parameter(torch.randn(4, 4, dtype=torch.bfloat16))}
    plain = OptimizerConfig(name="Muon", args={"nesterov": False})
    with pytest.raises(UserError, match=r"^optimizer Muon: with nesterov: false .* of w, .*"):
        make_optimizer(plain, weight)
    make_optimizer(OptimizerConfig(name="Muon"), weight)
    make_optimizer(plain, {"w": nn.Parameter(torch.randn(4, 4))})


def test_a_checkpoint_says_who_learned_what() -> None:
    tensors: Mapping[str, Tensor] = {
        name: torch.zeros((2, 2) if role.is_matrix else 2) for name, role in ROLES.items()
    }
    remembered = ["a.weight/momentum_buffer", "head/exp_avg", "table/exp_avg", "a.bias/exp_avg"]
    found = roles_by_state(tensors, remembered)
    by_state, by_role = (groups(with_others(MUON, known), ROLES) for known in (found, ROLES))
    assert [each.members for each in by_state] == [each.members for each in by_role]
