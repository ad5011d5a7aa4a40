"""The ways to train that are compared: a schedule, an optimizer, a correction for late gradients.

All have the same model, samples, batch size and number of updates, the same schedule of the
learning rate, and their rate from the same grid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipedream.graph.choices import ScheduleName
from pipedream.graph.run_config import RunConfig

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
"""Where topics_gpt.py is, a byte-level GPT and its text."""

LENGTH, WIDTH, HEADS, BATCH = 64, 64, 4, 4
UPDATES = 1639
"""Of an epoch: its 6,556 windows of text in minibatches of 4. With larger ones, and fewer updates,
the best learning rate is as high as is just stable: with late gradients that is half of it at most,
whatever corrects them."""

GRID = tuple(round(10 ** (-3.4 + 0.4 * each), 6) for each in range(8))
"""Learning rates, a factor of 2.5 apart."""

DECAY, BETAS, CLIP = 0.01, (0.9, 0.95), 1.0
"""As language models are trained; without clipping the losses of seeds are 7 % apart."""


@dataclass(frozen=True)
class Method:
    """`plain`: the name of the method that it is compared with, whose gradients are not late."""

    schedule: ScheduleName
    optimizer: str
    plain: str
    asynchronous: Mapping[str, Any] = field(default_factory=dict)
    betas: tuple[float, float] = BETAS

    @property
    def groups(self) -> int:
        """How many learning rates it has."""
        return 2 if self.optimizer == "Muon" else 1


ADAM, MUON, ROTATED = "flush AdamW", "flush Muon", "flush rotated"
ROTATION = {"basis_rotation": {"every": 10}}
FEEDBACK = {"error_feedback": True}

METHODS = {
    ADAM: Method("flush", "AdamW", ADAM),
    MUON: Method("flush", "Muon", MUON),
    ROTATED: Method("flush", "AdamW", ROTATED, ROTATION),
    "2bw AdamW": Method("2bw", "AdamW", ADAM),
    "2bw AdamW feedback": Method("2bw", "AdamW", ADAM, FEEDBACK),
    "2bw Muon": Method("2bw", "Muon", MUON),
    "2bw Muon feedback": Method("2bw", "Muon", MUON, FEEDBACK),
    "stashing AdamW": Method("weight-stashing", "AdamW", ADAM),
    "stashing nesterov": Method(
        "weight-stashing", "AdamW", ADAM, {"nesterov": 0.99}, betas=(0.9, 0.999)
    ),
    "stashing rotation": Method("weight-stashing", "AdamW", ADAM, ROTATION),
    "stashing feedback": Method("weight-stashing", "AdamW", ADAM, FEEDBACK),
    "stashing rotation feedback": Method("weight-stashing", "AdamW", ADAM, ROTATION | FEEDBACK),
    "stashing Muon": Method("weight-stashing", "Muon", MUON),
    "stashing Muon feedback": Method("weight-stashing", "Muon", MUON, FEEDBACK),
    "stashing prediction": Method("weight-stashing", "AdamW", ADAM, {"weight_prediction": True}),
}


def config_of(
    method: Method, stages: int, rates: Sequence[float], seed: int, epochs: int = 1
) -> RunConfig:
    """Returns the run config of a model with a block for each stage. `rates`: one for each group of
    parameters.
    """
    sizes = {"length": LENGTH, "width": WIDTH, "heads": HEADS, "layers": stages, "dropout": 0.0}
    cosine = {
        "max_lr": list(rates),
        "total_steps": epochs * UPDATES + 1,  # in microbatches an epoch has a rest, too
        "pct_start": 0.1,
        "cycle_momentum": False,
    }
    return RunConfig.model_validate(
        {
            "format": "pipedream-run/1",
            "model": {"source": "topics_gpt:model", "args": sizes},
            "data": {"source": "topics_gpt:data", "args": {"length": LENGTH}},
            "loss": "topics_gpt:loss",
            "optimizer": optimizer_of(method, rates),
            "scheduler": {"name": "OneCycleLR", "args": cosine, "every": "update"},
            "clip_norm": CLIP,
            "batch_size": BATCH,
            "drop_last": True,
            "microbatches": 1,
            "epochs": epochs,
            "seed": seed,
            "asynchronous": dict(method.asynchronous),
        }
    )


def optimizer_of(method: Method, rates: Sequence[float]) -> dict[str, Any]:
    """Muon's steps are made as large as those of AdamW. What it does not learn has the first rate:
    AdamW suffers more from late gradients, and one rate for both would hold Muon back.
    """
    first, *rest = rates
    adam = {"lr": first, "weight_decay": DECAY, "betas": list(method.betas)}
    if method.optimizer != "Muon":
        return {"name": method.optimizer, "args": adam}
    (second,) = rest
    muon = {"lr": second, "weight_decay": DECAY, "adjust_lr_fn": "match_rms_adamw"}
    return {"name": method.optimizer, "args": muon, "others": adam}
