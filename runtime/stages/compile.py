"""How a stage's module is run: as it is, in lower precision, compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.func import functional_call

from pipedream.capture.compute_settings import lowered
from pipedream.capture.segment import Segment
from pipedream.graph.errors import UserError
from pipedream.graph.run_config import RunConfig
from pipedream.runtime.engine.randomness import SeedHook

Compute: TypeAlias = Callable[[Mapping[str, Tensor], tuple[Tensor, ...]], Any]
"""(parameters and buffers by name, inputs) -> what the stage's module gives."""


def plain(piece: Segment) -> Compute:
    """Runs the stage's module as it is."""

    def run(tensors: Mapping[str, Tensor], inputs: tuple[Tensor, ...]) -> Any:
        return functional_call(piece.module, dict(tensors), inputs)

    return run


def make_compute(piece: Segment, config: RunConfig, device: torch.device) -> Compute:
    """Raises UserError for a torch.compile backend that does not exist."""
    run = plain(piece)
    if config.compile is not None:
        known = torch.compiler.list_backends(exclude_tags=())
        if config.compile not in known:
            raise UserError(f"compile: {config.compile!r} is no backend here; write inductor")
        for module in piece.module.modules():
            if isinstance(module, SeedHook):  # a compiled one would seed only once
                module.forward = torch.compiler.disable(module.forward)  # type: ignore
        # Never for shapes in general: the last, smaller minibatch has a piece of its own.
        run = torch.compile(run, backend=config.compile, dynamic=False)

    def compute(tensors: Mapping[str, Tensor], inputs: tuple[Tensor, ...]) -> Any:
        with lowered(config.autocast, device):
            return run(tensors, inputs)

    return compute
