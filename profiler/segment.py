"""A piece of a captured model that runs by itself: one node for the profiler, a stage for a run.

A skeleton of the interface; the body follows.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import fx

from pipedream.profiler.capture import Captured


@dataclass(frozen=True)
class Segment:
    """`module(*inputs) -> tuple of outputs`, holding only its own parameters and buffers.

    `inputs` and `outputs` are names of values of the capture (`captured.values[name]`). Parameters
    and buffers keep the names they have in the model.
    """

    module: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def segment(captured: Captured, nodes: Collection[str], keep: Collection[str] = ()) -> Segment:
    """The piece of `captured` made of the graph nodes `nodes`.

    Its inputs are the values it reads from other nodes (inputs of the model among them), its outputs
    those that other nodes read, and those named in `keep` that it makes.
    """
    raise NotImplementedError
