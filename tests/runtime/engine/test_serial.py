"""The serial reference itself, against figures worked out by hand and the plain model."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F


class Times(nn.Module):
    """x -> weight * x, from weight 1."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x):
        return self.weight * x


def product(serial, replicas, minibatches):
    """Losses and weights of y = ... * w_1 * w_0 * x on x = 1; the loss is y, the rate 0.1."""
    names = ["x", *[f"v{n}" for n in range(len(replicas))]]
    stages = [
        serial.Stage(Times(), (names[n],), (names[n + 1],), f"s{n}.") for n in range(len(replicas))
    ]
    made = serial.Serial(
        stages,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda values, _: values[names[-1]],
        "weight-stashing",
        replicas,
    )
    one = serial.Minibatch({"x": torch.ones((), dtype=torch.float64)}, None)
    losses = made.epoch([one] * minibatches)
    return made, losses, {name: tensor.item() for name, tensor in made.weights.items()}


def test_two_stages_by_hand(serial):
    _, losses, weights = product(serial, (1, 1), 3)
    # minibatch 1 runs on (w_0 after 0 updates, w_1 after 1), minibatch 2 on (after 1, after 2)
    assert losses == pytest.approx([1 * 1, 1 * 0.9, 0.9 * 0.8])
    assert weights == pytest.approx({"s0.weight": 1 - 0.1 - 0.09 - 0.08, "s1.weight": 0.8 - 0.09})


def test_replicas_by_hand(serial):
    made, losses, weights = product(serial, (2, 1), 3)
    # stage 0 runs all three on its first weights and averages 0 and 1, then 2 alone
    assert losses == pytest.approx([1, 0.9, 0.8])
    first = 1 - 0.1 * (1 + 0.9) / 2
    assert weights == pytest.approx({"s0.weight": first - 0.1 * 0.8, "s1.weight": 0.7})
    # drained: the next epoch begins on the newest weights everywhere
    one = serial.Minibatch({"x": torch.ones((), dtype=torch.float64)}, None)
    assert made.epoch([one]) == pytest.approx([(first - 0.08) * 0.7])


def test_flush_is_the_plain_model_on_the_whole_batch(serial):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    stages = [
        serial.Stage(nn.Sequential(model[0], model[1]), ("x",), ("h",)),
        serial.Stage(nn.Sequential(model[2]), ("h",), ("y",), "second."),
    ]
    made = serial.Serial(
        stages,
        lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        lambda values, target: F.mse_loss(values["y"], target),
        "flush",
        (2, 1),
        microbatches=3,
    )
    xs, ys = torch.randn(8, 4, 5).double(), torch.randn(8, 4, 3).double()
    made.epoch([serial.Minibatch({"x": x}, y) for x, y in zip(xs, ys, strict=True)])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for group in (slice(0, 3), slice(3, 6), slice(6, 8)):
        optimizer.zero_grad()
        F.mse_loss(model(xs[group].flatten(0, 1)), ys[group].flatten(0, 1)).backward()
        optimizer.step()
    found = list(made.weights.values())
    for parameter, tensor in zip(model.parameters(), found, strict=True):
        assert torch.allclose(parameter, tensor, rtol=0, atol=1e-12)


def test_one_stage_is_the_plain_model(serial):
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    made = serial.Serial(
        [serial.Stage(model, ("x",), ("y",))],
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda values, target: F.mse_loss(values["y"], target),
        "weight-stashing",
        (1,),
    )
    xs, ys = torch.randn(6, 4, 5).double(), torch.randn(6, 4, 3).double()
    batches = [serial.Minibatch({"x": x}, y) for x, y in zip(xs, ys, strict=True)]
    found = made.epoch(batches[:4]) + made.epoch(batches[4:])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, y, loss in zip(xs, ys, found, strict=True):
        optimizer.zero_grad()
        plain = F.mse_loss(model(x), y)
        plain.backward()
        optimizer.step()
        assert plain.item() == pytest.approx(loss, abs=1e-12)
    assert torch.allclose(made.weights["weight"], model.weight, rtol=0, atol=1e-12)


def test_buffers_stay_with_their_replica_and_are_averaged(serial):
    norm = nn.BatchNorm1d(1, momentum=0.5).double()
    made = serial.Serial(
        [serial.Stage(norm, ("x",), ("y",), "norm.")],
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda values, _: values["y"].sum(),
        "weight-stashing",
        (2,),
    )
    data = [torch.tensor([[a], [a]]).double() for a in (2.0, 6.0, 4.0)]
    made.epoch([serial.Minibatch({"x": x}, None) for x in data])
    # replica 0 sees 2 then 4, replica 1 sees 6
    mean = ((0 + 2) / 2 + 4) / 2, (0 + 6) / 2
    assert made.buffers["norm.running_mean"].item() == pytest.approx(sum(mean) / 2)
    assert norm.running_mean.item() == 0


def test_skip_connections_may_pass_stages_by(serial):
    """The links of the schedule come from who reads what."""
    stages = [
        serial.Stage(nn.Linear(2, 2), ("x",), ("a",)),
        serial.Stage(nn.Linear(2, 2), ("a",), ("b",)),
        serial.Stage(nn.Bilinear(2, 2, 1), ("a", "b"), ("y",)),
    ]
    made = serial.Serial(stages, torch.optim.SGD, None, "weight-stashing", (1, 2, 1))
    assert sorted(made._links()) == [(0, 1), (0, 2), (1, 2)]
