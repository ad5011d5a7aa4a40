"""Random numbers that are the same under every plan: dropout draws by minibatch and operator.

Before each operator that draws, the generator is seeded with the run's seed, the epoch, the
minibatch, and the operator's position in the captured model. So it does not matter which rank runs
the operator, what else runs there, whether it is recomputed, or where a run was resumed.
"""

from __future__ import annotations

import hashlib
import struct
from contextlib import AbstractContextManager

import torch
from torch import fx, nn

from pipedream.capture.programs.draws import note_seed
from pipedream.capture.rewrites.drawn_apart import probability
from pipedream.capture.rewrites.writes import is_draw
from pipedream.capture.segment import Segment


class MinibatchRng:
    """The seed of every random operator on one rank. `seed`: of the run config."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed, self.device = seed, device
        self.epoch, self.minibatch = 0, 0

    def seed_operator(self, position: int) -> None:
        """Seeds the generator of the device for the operator at `position`."""
        key = struct.pack("<4q", self.seed, self.epoch, self.minibatch, position)
        number = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index or 0].manual_seed(number)
        else:
            torch.default_generator.manual_seed(number)

    def apart(self) -> AbstractContextManager[None]:
        """Returns a context for passes, which leaves the random numbers of others as they are."""
        return torch.random.fork_rng([self.device] if self.device.type == "cuda" else [])


class SeedHook(nn.Module):
    """A module that runs right before an operator that draws, and seeds it; where the operator is
    only traced, it takes part in the trace.
    """

    def __init__(self, rng: MinibatchRng, position: int) -> None:
        super().__init__()
        self.rng, self.position = rng, position

    def forward(self) -> None:
        if not note_seed(self):
            self.rng.seed_operator(self.position)


def _operator_positions(captured: fx.GraphModule) -> dict[str, int]:
    """Returns the position of each operator of the captured model and its subgraphs, by path."""
    paths = (
        _path(prefix, node)
        for prefix, module in captured.named_modules()
        if isinstance(module, fx.GraphModule)
        for node in module.graph.nodes
    )
    return {path: position for position, path in enumerate(paths)}


def seed_each(part: Segment, captured: fx.GraphModule, rng: MinibatchRng) -> None:
    """Puts a seed before every operator of the segment that draws random numbers, in place."""
    positions = _operator_positions(captured)
    for prefix, module in part.module.named_modules():
        if isinstance(module, fx.GraphModule):
            draws = [n for n in module.graph.nodes if is_draw(n) and probability(n) != 0.0]
            for node in draws:
                position = positions[_path(prefix, node)]
                module.add_submodule(f"seed_{position}", SeedHook(rng, position))
                with module.graph.inserting_before(node):
                    module.graph.call_module(f"seed_{position}")
            module.recompile()


def _path(prefix: str, node: fx.Node) -> str:
    return f"{prefix}.{node.name}" if prefix else node.name
