"""The engine itself, in real processes: several stages on a rank, backward passes in two halves.

What it does is given by schedules that pd-train does not have (tests/support/pipelines.py); what it
learns is compared with the plain model.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import small_models
import torch
import torch.distributed as dist
from pipelines import Orders, halved, interleaved, zero_bubble
from plans import cut, make_plan
from processes import free_port, run_processes
from schedules import schedule
from torch import Tensor, nn
from training import chain_config

from pipedream.capture.captured import Captured
from pipedream.capture.export import capture
from pipedream.comm.communicators import Communicators, for_messages
from pipedream.comm.stage_groups import SummingRanks
from pipedream.comm.transport import Transport
from pipedream.graph.plan import Plan
from pipedream.graph.run_config import OptimizerConfig
from pipedream.runtime.data.batch import Batch
from pipedream.runtime.engine.engine import Engine
from pipedream.runtime.engine.executor import Executor
from pipedream.runtime.optim.optimizers import make_optimizer
from pipedream.runtime.optim.rates import LearningRate, LossSum
from pipedream.runtime.optim.stepping import StageStepping, Stepping
from pipedream.runtime.optim.weights import Weights
from pipedream.runtime.run.action_stream import ActionStream
from pipedream.runtime.run.training_segment import TrainingSegment
from pipedream.runtime.stages.partition import StageInterface, interfaces, links
from pipedream.runtime.stages.randomness import MinibatchRng
from pipedream.runtime.stages.stage_forms import StageForms
from pipedream.runtime.stages.stage_module import StageModule
from pipedream.schedule.action import Kind
from pipedream.schedule.channel import team_links
from pipedream.schedule.checker import check_ranks

CPU = torch.device("cpu")
OPTIMIZER = OptimizerConfig(name="SGD", args={"lr": 0.2, "momentum": 0.9, "weight_decay": 0.01})
EPOCHS = 2

Trained = tuple[dict[int, float], dict[str, list[Any]], dict[int, int]]
"""Losses by minibatch (of all epochs), weights by name, versions held at most by stage."""


def plain_model(name: str) -> nn.Module:
    torch.manual_seed(3)
    model: nn.Module = getattr(small_models, name)().double()
    return model


def captured_model(name: str) -> Captured:
    return capture(plain_model(name), (torch.randn(4, 6, dtype=torch.float64),))


def plan_of(captured: Captured, replicas: Sequence[int]) -> Plan:
    return make_plan(captured.graph, cut(captured.graph, len(replicas)), replicas)


def links_of(name: str, stages: int) -> Sequence[tuple[int, int]]:
    captured = captured_model(name)
    return links(interfaces(captured, plan_of(captured, [1] * stages)))


class Data:
    """An epoch of minibatches of four examples."""

    def __init__(self, minibatches: int) -> None:
        dataset, _ = small_models.regression(4 * minibatches)
        x, y = dataset.tensors
        self.batches = [Batch((a,), b) for a, b in zip(x.split(4), y.split(4), strict=True)]

    def inputs(self, minibatch: int, which: Collection[int]) -> list[Tensor]:
        return [self.batches[minibatch].inputs[position] for position in which]

    def peek(self, minibatch: int) -> Batch:
        raise AssertionError("all minibatches are alike")

    def target(self, minibatch: int) -> Tensor:
        return self.batches[minibatch].target


def trained(rank: int, workers: int, port: int, name: str, orders: Orders, again: bool) -> Trained:
    """What this rank has of the model after some epochs; `again`: its stages recompute.

    Those runs take the ways that NCCL has, groups of two ranks, and not gloo's tags and threads.
    """
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=workers)
    captured = captured_model(name)
    every = interfaces(captured, plan_of(captured, orders.schedule.spec.replicas))
    assignment = orders.assignment
    taken, backend = team_links(assignment, links(every)), "nccl" if again else "gloo"
    summing = SummingRanks(assignment, rank, {})
    wanted = [*summing.communicators(), *for_messages(taken, backend)]
    communicators = Communicators.connect(wanted, CPU, backend, 60.0)
    transport = Transport(CPU, backend, communicators.links)
    losses = dict[int, float]()
    executors, groups = {}, summing.groups(communicators)
    for interface in every:
        if rank in orders.ranks[interface.stage]:
            own = groups[interface.stage]
            executors[interface.stage] = executor(
                captured, interface, orders, transport, own, again
            )
    engine = Engine(executors, transport, after=lambda action: None)
    minibatches = orders.schedule.minibatches
    for epoch in range(EPOCHS):
        for each in executors.values():
            each.on_loss = lambda b, loss, e=epoch: losses.update(
                {e * minibatches + b: loss.item()}
            )
        engine.run(
            ActionStream(TrainingSegment(0, minibatches), orders.actions[rank]), Data(minibatches)
        )
    halved = {a.stage for a in orders.actions[rank] if a.kind is Kind.BACKWARD_INPUT}
    programs = {stage: each.stage_modules.of(0).program for stage, each in executors.items()}
    assert {stage for stage, program in programs.items() if program.named is not None} == halved
    assert not any(transport.handed.values())
    assert not any(channel.is_local for channel, _ in transport.spare)
    transport.barrier()
    dist.destroy_process_group()
    weights = {n: p.tolist() for e in executors.values() for n, p in e.weights.parameters.items()}
    return losses, weights, {s: e.weights.peak_versions for s, e in executors.items()}


def executor(
    captured: Captured,
    interface: StageInterface,
    orders: Orders,
    transport: Transport,
    groups,
    again: bool,
) -> Executor:
    plan = plan_of(captured, orders.schedule.spec.replicas)
    stage_module = StageModule.of(captured, plan, interface.stage)
    parameters = dict(stage_module.piece.module.named_parameters())
    optimizer = make_optimizer(OPTIMIZER, parameters)
    config, rate = chain_config(OPTIMIZER), LearningRate(None, optimizer, Path())
    return Executor(
        stage_modules=StageForms(stage_module),
        weights=Weights(parameters),
        stepping=Stepping(
            {interface.stage: StageStepping(optimizer, parameters, config, rate, ())},
            config,
            LossSum(lambda tensor: None, CPU),
            lambda tensor: None,
        ),
        transport=transport,
        groups=groups,
        assignment=orders.assignment,
        loss=nn.functional.mse_loss,
        on_loss=lambda b, loss: None,
        rng=MinibatchRng(0, CPU),
        recompute=again and interface.stage < len(orders.ranks) - 1,
    )


def run(name: str, orders: Orders, again: bool = False) -> list[Trained]:
    """What each rank tells. The orders are proved before."""
    check_ranks(orders.schedule, orders.actions, orders.assignment)
    return run_processes(trained, len(orders.actions), free_port(), name, orders, again)


def assert_as_plain(name: str, orders: Orders, results: Sequence[Trained]) -> None:
    """The plain model, one step of the optimizer for the mean of each round."""
    model = plain_model(name)
    optimizer = torch.optim.SGD(model.parameters(), **OPTIMIZER.args)
    size, minibatches = orders.schedule.spec.microbatches, orders.schedule.minibatches
    data, expected = Data(minibatches), []
    for _ in range(EPOCHS):
        for first in range(0, minibatches, size):
            batches = data.batches[first : min(first + size, minibatches)]
            found = [nn.functional.mse_loss(model(*each.inputs), each.target) for each in batches]
            (sum(found) / len(batches)).backward()
            optimizer.step()
            optimizer.zero_grad()
            expected += [loss.item() for loss in found]
    assert_same(
        results, dict(enumerate(expected)), {n: p.tolist() for n, p in model.named_parameters()}
    )


def assert_same(
    results: Sequence[Trained], losses: dict[int, float], weights: dict[str, Any]
) -> None:
    found = {b: loss for rank in results for b, loss in rank[0].items()}
    assert found == pytest.approx(losses, rel=1e-12)
    held = {name: tensor for rank in results for name, tensor in rank[1].items()}
    assert held.keys() == weights.keys()
    for name, values in weights.items():
        one, other = (torch.tensor(each, dtype=torch.float64) for each in (held[name], values))
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["Chain", "Skips"])
@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_two_stages_on_each_rank_learn_what_the_plain_model_does(name: str, again: bool) -> None:
    """With skips a stage hands values over to one of its own rank."""
    every = links_of(name, 4)
    assert ((1, 3) in every) == (name == "Skips")
    orders = interleaved(2, 4, 8, 4, every)
    results = run(name, orders, again)
    assert [sorted(rank[2]) for rank in results] == [[0, 2], [1, 3]]
    assert_as_plain(name, orders, results)


@pytest.mark.slow
def test_all_stages_on_one_rank_send_nothing() -> None:
    orders = interleaved(1, 4, 6, 3, links_of("Skips", 4))
    assert_as_plain("Skips", orders, run("Skips", orders))


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "stages"), [("Chain", 2), ("Skips", 3)])
@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_backward_passes_in_halves_learn_what_whole_ones_do(
    name: str, stages: int, again: bool
) -> None:
    """The last round is smaller."""
    orders = zero_bubble(stages, 10, 4, links_of(name, stages))
    assert_as_plain(name, orders, run(name, orders, again))


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("schedule_name", ["weight-stashing", "2bw"])
def test_a_version_of_the_weights_stays_until_the_second_half(schedule_name: str) -> None:
    """Sums over the replicas begin in it, too: two of three ranks have the first stage."""
    made = schedule(schedule_name, (2, 1), [(0, 1)], 11, 4)  # type: ignore[arg-type]
    halves = halved(made)
    whole = Orders(
        made, halves.ranks, {halves.ranks[s][r]: made.actions((s, r)) for s, r in made.workers}
    )
    reference, results = run("Chain", whole), run("Chain", halves)
    assert [rank[2] for rank in results] == [rank[2] for rank in reference]
    losses = {b: loss for rank in reference for b, loss in rank[0].items()}
    assert_same(results, losses, {n: t for rank in reference for n, t in rank[1].items()})
