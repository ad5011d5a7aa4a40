"""Imported once by the server that forks the workers of a test: what all of them would import."""

import gc
import importlib

import matplotlib.backends.backend_agg
import matplotlib.figure  # noqa: F401
import pipelines  # noqa: F401  (its orders are known to pd-train in every process)
import torch
from torch import nn

import pipedream.runtime.trainer  # noqa: F401
from pipedream.capture.export import capture
from pipedream.capture.sources.vision import load_torchvision

torch.set_num_threads(1)
load_torchvision("squeezenet1_1", {})
for family in ("bert", "gpt2", "llama"):  # after torchvision, which they import
    importlib.import_module(f"transformers.models.{family}.modeling_{family}")
capture(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), (torch.randn(1, 2),))
gc.collect()
gc.freeze()  # else each fork's first collection looks through all of this, and copies its pages
