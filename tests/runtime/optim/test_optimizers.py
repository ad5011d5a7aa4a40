"""What an optimizer remembers, put back where torch.optim looks for it; sparse gradients."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small_models
import torch
from plans import cut, make_plan
from torch import nn
from torch.nn import functional as F
from training import chain_config, losses, run_jobs, weights

from pipedream.capture.export import capture
from pipedream.graph.errors import UserError
from pipedream.graph.run_config import (
    DataFactory,
    Factory,
    GroupConfig,
    OptimizerConfig,
    SchedulerConfig,
)
from pipedream.runtime.data.reader import Epoch
from pipedream.runtime.optim.optimizers import (
    groups,
    make_optimizer,
    remembered_names,
    restore_state,
    state_tensors,
)
from pipedream.runtime.run.job import Job
from tests.runtime.engine.test_semantics import plan_for

SUPPORT = Path(small_models.__file__).parent


@pytest.mark.parametrize(
    ("args", "device"),
    [
        ({}, "meta"),  # fused, unless it is said otherwise
        ({"capturable": True}, "meta"),
        ({"foreach": True}, "cpu"),
        ({"fused": False}, "cpu"),
    ],
)
def test_the_count_of_steps_is_where_the_step_is_made(args: dict[str, bool], device: str) -> None:
    """A resumed run on a GPU stopped at its first step: the fused kernel got a count on the CPU.
    Here the meta device stands for it.
    """
    parameters = {"w": nn.Parameter(torch.empty(2, 3, device="meta"))}
    optimizer = make_optimizer(OptimizerConfig(name="Adam", args=args), parameters)
    known = {"w/step": torch.tensor(7.0), "w/exp_avg": torch.ones(2, 3)}
    restore_state(optimizer, parameters, known)
    found = {key: tensor.device.type for key, tensor in optimizer.state[parameters["w"]].items()}
    assert found == {"step": device, "exp_avg": "meta"}


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_weights_in_bfloat16_learn_what_plain_ones_do(name: str) -> None:
    """By torch's fused kernel for the CPU most of their elements stayed as they were."""
    torch.manual_seed(0)
    ours, plain = (nn.Parameter(torch.ones(37, 33, dtype=torch.bfloat16)) for _ in range(2))
    gradient = torch.randn(37, 33, dtype=torch.bfloat16)
    optimizers = (
        make_optimizer(OptimizerConfig(name=name, args={"lr": 0.1}), {"w": ours}),
        getattr(torch.optim, name)([plain], lr=0.1),
    )
    for optimizer, parameter in zip(optimizers, (ours, plain), strict=True):
        parameter.grad = gradient.clone()
        optimizer.step()
    assert torch.equal(ours, plain)
    assert not torch.equal(ours, torch.ones_like(ours))
    chosen = OptimizerConfig(name=name, args={"lr": 0.1, "fused": True})
    with pytest.raises(UserError, match="kernels for the CPU are wrong"):
        make_optimizer(chosen, {"w": ours})


@pytest.mark.slow
def test_an_embedding_with_sparse_gradients_learns_as_in_the_plain_loop(tmp_path: Path) -> None:
    """Where the plain loop has sparse gradients, the stage has dense ones of the same values."""
    optimizer = OptimizerConfig(name="Adagrad", args={"lr": 0.1})
    config = chain_config(optimizer).model_copy(
        update={
            "model": Factory(source="small_models:Words"),
            "data": DataFactory(source="small_models:tokens", args={"examples": 32}),
            "dtype": "float64",
        }
    )
    data, _ = small_models.tokens(examples=32)
    graph = capture(small_models.Words(), (data.tensors[0][:4],)).graph
    plan = make_plan(graph, cut(graph, 2), (1, 1), "flush")
    job = Job(plan, config, SUPPORT, tmp_path, schedule="flush")
    run_jobs([job])
    torch.manual_seed(config.seed)
    model = small_models.Words().double()
    plain, sparse, found = torch.optim.Adagrad(model.parameters(), lr=0.1), False, []
    epoch = Epoch(data, config, 1, torch.device("cpu"))
    batches = [epoch.batch(index) for index in range(len(epoch))]
    for begin in range(0, len(batches), config.microbatches):
        part = batches[begin : begin + config.microbatches]
        each = [F.mse_loss(model(batch.inputs[0]), batch.target) for batch in part]
        found += [loss.item() for loss in each]
        torch.stack(each).mean().backward()
        gradient = model.a.weight.grad
        sparse |= gradient is not None and gradient.is_sparse
        plain.step()
        plain.zero_grad()
    assert sparse
    assert losses(job) == pytest.approx(found, rel=1e-12)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(weights(job)[name], tensor, rtol=1e-12, atol=1e-12)


NAMES = ("a.weight", "a.bias", "norm.weight", "norm.bias", "c.weight")


def config(*matches: tuple[str, ...], **more: Any) -> OptimizerConfig:
    found = tuple(GroupConfig(match=match, **more) for match in matches)
    return OptimizerConfig(name="AdamW", args={"lr": 0.1, "weight_decay": 0.2}, groups=found)


def test_the_first_group_that_matches_has_a_parameter_and_the_rest_come_last() -> None:
    found = groups(config(("*.bias",), ("c.*", "*norm*"), args={"weight_decay": 0.0}), NAMES)
    assert [set(group.members) for group in found] == [
        {"a.bias", "norm.bias"},
        {"norm.weight", "c.weight"},
        {"a.weight"},
    ]
    assert found[1].optimizer.args == {"lr": 0.1, "weight_decay": 0.0}
    assert found[2].optimizer.args == {"lr": 0.1, "weight_decay": 0.2}


def test_without_a_rest_there_is_no_group_of_it() -> None:
    assert len(groups(config(("*.bias",), ("*",)), NAMES)) == 2
    assert [group.members for group in groups(config(), NAMES)] == [frozenset(NAMES)]
    assert [group.members for group in groups(config(), ())] == [frozenset()]


def test_another_optimizer_has_its_own_arguments_alone() -> None:
    muon, rest = groups(config(("*.weight",), name="Muon", args={"lr": 0.5}), NAMES)
    assert (muon.optimizer.name, muon.optimizer.args) == ("Muon", {"lr": 0.5})
    assert rest.optimizer.name == "AdamW"
    assert config(("*.weight",), ("*",), name="Muon").names == "AdamW and Muon"


@pytest.mark.parametrize(
    ("matches", "message"),
    [
        (
            [("*.bias", "*.bais")],
            r"^optimizer.groups.0: '\*.bais' matches no parameter of the model, such as a.weight",
        ),
        ([("*",), ("*.bias",)], r"^optimizer.groups.1: the groups before it have all"),
    ],
)
def test_a_group_that_gets_nothing_is_a_mistake(
    matches: list[tuple[str, ...]], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        groups(config(*matches), NAMES)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            config(("*.bias",), args={"weigth_decay": 0.0}),
            r"^optimizer.groups.0 AdamW .* argument 'weigth_decay'",
        ),
        (config(("*.bias",), args={"lr": -1.0}), r"^optimizer.groups.0 AdamW .*: -1.0$"),
        (
            OptimizerConfig(name="Muon"),
            r"^optimizer Muon learns matrices, and a.bias has 1 dimensions: .* name: AdamW\}\]$",
        ),
    ],
)
def test_what_an_optimizer_cannot_do_for_a_group(given: OptimizerConfig, message: str) -> None:
    parameters = {
        "a.weight": nn.Parameter(torch.zeros(2, 2)),
        "a.bias": nn.Parameter(torch.zeros(2)),
    }
    with pytest.raises(UserError, match=message):
        make_optimizer(given, parameters)


@pytest.mark.thorough
@pytest.mark.slow
def test_groups_go_on_under_another_plan(tmp_path: Path) -> None:
    """Each stage has the rates of all groups in one order, those of which it has no member, too:
    of this scheduler each group has its own. Under the first plan a stage has none of the first
    group, under the second two have none.
    """
    captured = capture(small_models.Chain(), (torch.randn(4, 6),))
    optimizer = OptimizerConfig(
        name="AdamW",
        args={"lr": 0.02},
        groups=(
            GroupConfig(match=("a.*weight",), args={"betas": (0.8, 0.99)}),
            GroupConfig(match=("*.bias",), args={"weight_decay": 0.0, "lr": 0.05}),
        ),
    )
    factors = ["small_models:rising", "small_models:falling", "small_models:rising"]
    scheduler = SchedulerConfig(name="LambdaLR", args={"lr_lambda": factors}, every="update")
    changes = {"dtype": "float64", "microbatches": 4, "scheduler": scheduler}
    chosen = chain_config(optimizer).model_copy(update=changes)
    two, three = (
        plan_for(captured, parts, (1,) * len(parts)) for parts in (("a", "bc"), ("a", "b", "c"))
    )
    whole = Job(two, chosen, SUPPORT, tmp_path / "two", schedule="flush", epochs=2, save_every=8)
    run_jobs([whole])
    other = replace(whole, plan=three, run=tmp_path / "three", resume=True)
    shutil.copytree(whole.checkpoints, other.checkpoints, symlinks=True)
    shutil.copy(whole.run / "metrics.jsonl", other.run)
    for name in ("epoch-0001-000008", "epoch-0002"):
        shutil.rmtree(other.checkpoints / name)
    run_jobs([other])

    torch.manual_seed(chosen.seed)
    model = small_models.Chain().double()
    named = dict(model.named_parameters())
    first = [named.pop("a.linear.weight")]
    biases = [named.pop(name) for name in list(named) if name.endswith("bias")]
    plain = torch.optim.AdamW(
        [
            {"params": first, "betas": (0.8, 0.99)},
            {"params": biases, "weight_decay": 0.0, "lr": 0.05},
            {"params": list(named.values())},
        ],
        lr=0.02,
    )
    functions: Any = [small_models.rising, small_models.falling, small_models.rising]
    rate = torch.optim.lr_scheduler.LambdaLR(plain, functions)
    expected = []
    for number in (1, 2):
        epoch = Epoch(small_models.regression()[0], chosen, number, torch.device("cpu"))
        batches = [epoch.batch(index) for index in range(len(epoch))]
        for begin in range(0, len(batches), 4):
            part = [F.mse_loss(model(b.inputs[0]), b.target) for b in batches[begin : begin + 4]]
            expected += [loss.item() for loss in part]
            torch.stack(part).mean().backward()
            plain.step()
            plain.zero_grad()
            rate.step()
    for job in (whole, other):
        assert losses(job) == pytest.approx(expected, rel=1e-12)
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(weights(job)[name], tensor, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "name",
    [
        "ASGD",
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "AdamW",
        "Muon",
        "NAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    ],
)
def test_what_an_optimizer_will_remember_is_known_before_its_first_step(name: str) -> None:
    model = nn.Linear(3, 4, bias=False)
    args = {"lr": 0.1, "momentum": 0.9} if name in ("RMSprop", "SGD") else {"lr": 0.1}
    config = OptimizerConfig(name=name, args=args)
    optimizer = make_optimizer(config, {"weight": model.weight})
    before = model.weight.detach().clone()
    expected = remembered_names(optimizer, model.weight)
    assert torch.equal(model.weight, before)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    remembered = state_tensors(optimizer, {"weight": model.weight})
    assert {key.removeprefix("weight/") for key in remembered} == expected
