"""Sums of gradients that several stages have, of which each is on a mesh of its own."""

from __future__ import annotations

import random
from typing import cast

import numpy as np
import pytest
import torch
from sharded import MESHES, hold, random_placements, random_shape
from torch import Tensor, nn

from pipedream.comm.tied_sums import GradientPart, TiedSums
from pipedream.comm.transport import Transport
from pipedream.graph.placements.placement import device_count

NO_TRANSPORT = cast("Transport", None)
"""All stages are on this rank, which sends nothing."""


@pytest.mark.parametrize("seed", range(100))
def test_each_device_has_its_part_of_the_sum(seed: int) -> None:
    """Two stages with random meshes and placements, partial ones too. Here each of their devices
    takes the place of a stage of this rank.
    """
    rng = random.Random(seed)
    shape = random_shape(rng)
    total, devices = np.zeros(shape), []
    for _ in range(2):
        mesh = rng.choice(MESHES)
        placements = random_placements(rng, shape, mesh)
        array = np.random.default_rng(seed).integers(-99, 99, shape).astype(float)
        total += array
        terms = hold(array, mesh, placements, rng)
        parts = [GradientPart.of(shape, mesh, placements, d) for d in range(device_count(mesh))]
        devices += zip(parts, map(torch.from_numpy, terms), strict=True)
    sums = TiedSums({"w": range(len(devices))}, {"w": None})
    gradients = [{"w": term.clone()} for _, term in devices]
    for number, (part, term) in enumerate(devices):
        own = {"w": nn.Parameter(torch.zeros_like(term))}
        sums.add_up(number, gradients[number], own, NO_TRANSPORT, lambda _, part=part: part)
    for (part, _), own in zip(devices, gradients, strict=True):
        expected = total
        for dim, intervals in enumerate(part.region.dims):
            indices = [index for begin, end in intervals for index in range(begin, end)]
            expected = expected.take(indices, dim)
        assert torch.equal(own["w"], torch.from_numpy(expected))


def test_stages_without_a_mesh() -> None:
    """A missing gradient is zero, each stage has memory of its own, and nobody learns what is
    frozen.
    """
    sums = TiedSums({"w": (0, 2), "frozen": (0, 2)}, {"w": None, "frozen": None})
    parameters = {"w": nn.Parameter(torch.zeros(2, 3))}
    parameters["frozen"] = nn.Parameter(torch.zeros(2), requires_grad=False)
    first: dict[str, Tensor] = {}
    last = {"w": torch.ones(2, 3)}
    sums.add_up(0, first, parameters, NO_TRANSPORT)
    assert not first
    sums.add_up(2, last, parameters, NO_TRANSPORT)
    first["w"] /= 2
    assert first.keys() == last.keys() == {"w"}
    assert torch.equal(last["w"], torch.ones(2, 3))
    assert torch.equal(first["w"], torch.full((2, 3), 0.5))
