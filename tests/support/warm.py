"""Imported once by the server that forks the workers of a test: what all of them would import."""

import torch
from torch import nn

import pipedream.runtime.trainer  # noqa: F401
from pipedream.profiler.capture import capture

torch.set_num_threads(1)
capture(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), (torch.randn(1, 2),))
