"""Estimated steps of Muon: momentum passes over memory, Newton-Schulz multiplies matrices."""

from __future__ import annotations

import pytest
import torch
from estimates import device
from torch import nn

from pipedream.capture.export import capture
from pipedream.profiler.estimate.roofline import Roofline
from pipedream.profiler.estimate.updates import updates


def test_muon_multiplies_the_matrices_of_hidden_layers() -> None:
    """256 x 1024 of float32 on a device with 2e14 flops a second for bfloat16 and 1e12 bytes, of
    which products get a quarter and passes half; launching takes a nanosecond.
    """
    model = nn.Sequential(nn.Linear(1024, 256), nn.Linear(256, 3))
    captured = capture(model, (torch.zeros(2, 1024),))
    efficiency = {
        "product": {"bfloat16": [(8.0, 8.0, 8.0, 0.0, 0.25)]},
        "pass": {"float32": [(10.0, 0.5)]},
    }
    found = updates(captured, Roofline(device(launch=1e-9, efficiency=efficiency)))
    muon, adam = found["muon"], found["adam"]
    assert muon.seconds is not None

    m, n, size = 256, 1024, 4 * 256 * 1024
    passing = (7 + 2) * size / 1e12 / 0.5
    wide = max(2 * m * m * n / 2e14, 2 * (2 * m * n + m * m) / 1e12) / 0.25
    square = max(2 * m**3 / 2e14, 2 * 3 * m * m / 1e12) / 0.25
    assert muon.seconds["0.weight"] == pytest.approx(passing + 5 * (2 * wide + square))
    assert muon.state["0.weight"] == size

    for name in ("0.bias", "1.weight", "1.bias"):
        own = dict(model.named_parameters())[name].nbytes
        assert muon.seconds[name] == pytest.approx(own / adam.bytes_per_second)
        assert muon.state[name] == 2 * own
    assert adam.in_place_bytes_per_second == pytest.approx(adam.bytes_per_second * 11 / 9)
    assert muon.in_place_bytes_per_second is None
