"""A profile as the model to train: sleeping, scaled, captured once for all processes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import sleeping_model
import torch

from pipedream.capture.captured import Captured
from pipedream.capture.export import capture
from pipedream.comm.buckets import BUCKET_BYTES
from pipedream.graph.model import Graph, read_graph

_GIGABYTE = 1e9
LEAST_BUCKET = 128 * 1024
"""Bytes: in an all-reduce of fewer, waiting for small messages would count more than it should."""


@dataclass(frozen=True)
class EmulatedModel:
    """The model of a graph.txt.

    `time_scale`: its seconds over those of the profile. `gigabyte`: the bytes per second that stand
    for 1 GB/s; sizes are scaled so that sending takes `time_scale` times as long, too.
    """

    name: str
    profile: Path
    time_scale: float
    gigabyte: float

    @staticmethod
    def of(profile: Path, minibatch_seconds: float, gigabyte: float) -> EmulatedModel:
        """The model of which one device computes a minibatch in `minibatch_seconds`."""
        seconds = sum(node.compute_seconds for node in read_graph(profile).nodes.values())
        return EmulatedModel(profile.parent.name, profile, minibatch_seconds / seconds, gigabyte)

    @property
    def arguments(self) -> dict[str, Any]:
        """What the factory of the sleeping model is called with."""
        return {
            "profile": str(self.profile.resolve()),
            "time_scale": self.time_scale,
            "byte_scale": self._byte_scale,
        }

    @property
    def bucket_bytes(self) -> int:
        """How many bytes of gradients are added up at once."""
        return max(LEAST_BUCKET, round(BUCKET_BYTES * self._byte_scale))

    @property
    def _byte_scale(self) -> float:
        return self.time_scale * self.gigabyte / _GIGABYTE

    @cached_property
    def captured(self) -> Captured:
        """As pd-train captures it."""
        model = sleeping_model.model(**self.arguments)
        return capture(model, (torch.zeros(sleeping_model.BATCH, 1),))

    @cached_property
    def graph(self) -> Graph:
        """The graph as pd-profile would write it, if layers took exactly their time."""
        times = sleeping_model.model(**self.arguments).seconds
        graph = self.captured.graph
        return graph.with_nodes(
            replace(graph.nodes[name], forward_seconds=forward, backward_seconds=backward)
            for name, (forward, backward) in zip(self.layers, times, strict=True)
        )

    @property
    def layers(self) -> list[str]:
        """The names of the layers in the captured graph, by their numbers in the sleeping model."""
        nodes = self.captured.graph.nodes
        return [name for name, node in nodes.items() if not node.is_input]

    def run_config(self, minibatches: int, microbatches: int) -> dict[str, Any]:
        """A run config for one epoch."""
        source = sleeping_model.__name__
        return {
            "format": "pipedream-run/1",
            "model": {"source": f"{source}:model", "args": self.arguments},
            "data": {"source": f"{source}:data", "args": {"minibatches": minibatches}},
            "loss": f"{source}:loss",
            "optimizer": {"name": "SGD", "args": {"lr": 0.01}},
            "batch_size": sleeping_model.BATCH,
            "microbatches": microbatches,
        }
