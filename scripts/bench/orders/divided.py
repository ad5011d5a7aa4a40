"""Models of equal layers, divided into stages of equally many: as a plan, and as modules."""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[3] / "tests" / "support"))
sys.path.append(str(Path(__file__).parents[1]))

from efficiency import STILL
from plans import make_plan

from pipedream.capture.captured import Captured
from pipedream.capture.export import capture
from pipedream.capture.sources.load import load_config
from pipedream.graph.plan import Plan
from pipedream.graph.run_config import RunConfig

BENCH = Path(__file__).parents[1]


@dataclass(frozen=True)
class Layered:
    """A model of models.py. `layers`: how many modules `path` has whose names are numbers;
    `shares`: how many of them each stage has [default: as many each].
    """

    config: Mapping[str, Any]
    path: str
    layers: int
    shares: tuple[int, ...] = ()

    def stage_of(self, layer: int, stages: int) -> int:
        ends = list(accumulate(self.shares or (self.layers // stages,) * stages))
        return bisect_right(ends, layer)

    @property
    def run(self) -> RunConfig:
        settings = {"optimizer": {"name": "SGD", "args": {"lr": STILL, "momentum": 0.9}}}
        return RunConfig.model_validate(
            {"format": "pipedream-run/1", "microbatches": 2, **settings, **self.config}
        )


MLP = Layered(
    {
        "model": {"source": "models:mlp"},
        "data": {"source": "models:mlp_data", "args": {"examples": 512}},
        "loss": "mse_loss",
        "batch_size": 128,
    },
    "",
    16,
)

MODELS = {
    "mlp": MLP,
    "unequal": replace(MLP, shares=(4, 2, 3, 7)),
    "gpt": Layered(
        {
            "model": {
                "source": "models:gpt",
                "args": {"length": 64, "width": 256, "layers": 4, "dropout": 0.0},
            },
            "data": {"source": "models:gpt_data", "args": {"length": 64, "examples": 64}},
            "loss": "models:gpt_loss",
            "batch_size": 8,
        },
        "blocks.",
        4,
    ),
}


def captured_model(name: str) -> Captured:
    run = MODELS[name].run
    loaded = load_config(run, BENCH, run.batch_size, meta=False)
    return capture(loaded.model, loaded.args, loaded.kwargs)


def planned(model: Layered, captured: Captured, order: str, rank_map: Sequence[int]) -> Plan:
    """The plan for a rank map; what is beside the layers goes with the one before, or the first."""
    pieces: list[list[str]] = [[] for _ in rank_map]
    layer, stage = re.compile(re.escape(model.path) + r"(\d+)"), 0
    for node in captured.graph.order:
        found = layer.match(captured.module_paths.get(node, ""))
        if found:
            stage = max(stage, model.stage_of(int(found[1]), len(rank_map)))
        pieces[0 if captured.graph.nodes[node].is_input else stage].append(node)
    data = make_plan(captured.graph, pieces, [1] * len(rank_map), "flush").model_dump()
    for each, place in zip(data["stages"], rank_map, strict=True):
        each["ranks"] = (place,)
    return Plan.model_validate(data | {"order": order})


def modules(name: str, whole: nn.Module, stages: int) -> list[nn.Module]:
    """The stages of a model of MODELS as plain modules, cut where `planned` cuts."""
    each = MODELS[name].layers // stages
    if name == "mlp":
        assert isinstance(whole, nn.Sequential)
        return [whole[stage * each : (stage + 1) * each] for stage in range(stages)]
    return [GptPart(whole, range(stage * each, (stage + 1) * each)) for stage in range(stages)]


class GptPart(nn.Module):
    """Some blocks of a topics_gpt.Gpt, with what comes before the first and after the last."""

    def __init__(self, whole: Any, blocks: range) -> None:
        super().__init__()
        self.blocks = whole.blocks[blocks.start : blocks.stop]
        self.begins, self.ends = blocks.start == 0, blocks.stop == len(whole.blocks)
        if self.begins:
            self.embed, self.position = whole.embed, whole.position
        if self.ends:
            self.norm, self.head = whole.norm, whole.head

    def forward(self, x: Tensor) -> Tensor:
        if self.begins:
            x = self.embed(x) + self.position[: x.shape[1]]
        x = self.blocks(x)
        return self.head(self.norm(x)) if self.ends else x
