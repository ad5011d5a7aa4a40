"""The run config: model, data, loss, optimizer. YAML, `pipedream-run/1`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from pipedream.graph.choices import MICROBATCHES
from pipedream.graph.errors import ArtifactModel, read_artifact


class Factory(ArtifactModel):
    """Something to call: `source` is `torchvision:NAME`, `timm:NAME`, `transformers:NAME` or
    `package.module:factory`; `args` its keyword arguments.
    """

    source: str
    args: dict[str, Any] = Field(default_factory=dict)

    @field_validator("source")
    @classmethod
    def _check_source(cls, source: str) -> str:
        if re.fullmatch(r"[\w.\-]+:[\w.\-/]+", source) is None:
            raise ValueError(f"write package.module:factory or torchvision:NAME, not {source!r}")
        return source


class DataFactory(Factory):
    """Where the data come from: `package.module:factory`, `torchvision-folder:PATH` or
    `huggingface:NAME_OR_PATH`, with paths from the config's folder.
    """

    @field_validator("source")
    @classmethod
    def _check_source(cls, source: str) -> str:
        if re.fullmatch(r"(torchvision-folder|huggingface):.+|[\w.\-]+:[\w.]+", source) is None:
            raise ValueError(
                "write package.module:factory, torchvision-folder:PATH or huggingface:NAME, not "
                f"{source!r}"
            )
        return source


class GroupConfig(ArtifactModel):
    """What is different for the parameters whose names match a pattern, such as `*.bias`.

    `args` go before those of the optimizer; with a `name` they are all that this other class of
    torch.optim is given.
    """

    match: tuple[str, ...] = Field(min_length=1)
    name: str | None = None
    args: dict[str, Any] = Field(default_factory=dict)


class OptimizerConfig(ArtifactModel):
    """A class of torch.optim by name, and its keyword arguments.

    A parameter belongs to the first of the `groups` that matches its name in the model. Those that
    match none make one more group, the last, with nothing but `args`.
    """

    name: str = "SGD"
    args: dict[str, Any] = Field(default={"lr": 0.01})
    groups: tuple[GroupConfig, ...] = ()

    @property
    def names(self) -> str:
        """All classes that there are, for a person."""
        others = (group.name for group in self.groups if group.name is not None)
        return " and ".join(dict.fromkeys((self.name, *others)))


class AsynchronousConfig(ArtifactModel):
    """What is done about gradients of weights that have changed meanwhile; docs/asynchronous.md.

    `rate_correction`: over so many updates of a stage its learning rate grows from that over its
    delay to the whole. `weight_prediction`: a minibatch runs on the weights as they are expected to
    be when it makes its update. `nesterov`: the momentum (such as 0.99) of the Nesterov form of the
    optimizer, which looks ahead by it.
    """

    rate_correction: int | None = Field(default=None, ge=1, strict=True)
    weight_prediction: bool = Field(default=False, strict=True)
    nesterov: float | None = Field(default=None, gt=0, lt=1)


class SchedulerConfig(ArtifactModel):
    """A class of torch.optim.lr_scheduler by name, and its keyword arguments.

    It goes a step after every epoch or every update. An update of a stage of r replicas that learns
    by itself (weight stashing, vertical sync) is r steps, so that all stages keep pace. Functions
    among the arguments are named as `package.module:function`.

    `metric`: what ReduceLROnPlateau looks at. The mean loss of each epoch, unless it is said
    otherwise; those of the held-out data are known as often as these are tried.
    """

    name: str
    args: dict[str, Any] = Field(default_factory=dict)
    every: Literal["epoch", "update"] = "epoch"
    metric: Literal["loss", "held_out_loss", "held_out_accuracy"] | None = None

    @property
    def needs_held_out(self) -> bool:
        return self.metric in ("held_out_loss", "held_out_accuracy")


class RunConfig(ArtifactModel):
    """One training run.

    `batch_size` is the minibatch that flows through the pipeline; with the schedules flush, gpipe
    and 2bw `microbatches` of them make one update. Examples that do not fill one make a smaller one
    at the end of the epoch; with `drop_last` they sit the epoch out. `loss` is a function of
    torch.nn.functional by name, `package.module:function`, or `output` where the model returns its
    own loss. `data_workers` processes of each rank read its data; with none a thread does.
    `sampler`, a sampler of torch.utils.data or one like them, chooses the examples of an epoch and
    their order; without it each epoch has all of them in an order of its own. The held-out data are
    tried every `evaluate_every` epochs, through the pipeline; without it after the last, on one
    worker.

    `accumulate`: with weight stashing and vertical sync a stage of r replicas makes one update of r
    times as many minibatches. `clip_norm`: the most that the norm of the gradients may be, over all
    stages or, where each learns by itself, over the stage. `autocast`: the type in which operators
    compute for which torch deems it safe. `loss_scale`: what the loss is multiplied by so that
    float16 gradients do not vanish; with float16 it is found by itself unless given. `nan`: what
    happens when a gradient is no number: the run stops, or the update is left out. `compile`: the
    torch.compile backend for each stage.
    """

    format: Literal["pipedream-run/1"]
    model: Factory
    data: DataFactory
    sampler: Factory | None = None
    loss: str = "cross_entropy"
    optimizer: OptimizerConfig = OptimizerConfig()
    asynchronous: AsynchronousConfig = AsynchronousConfig()
    scheduler: SchedulerConfig | None = None
    batch_size: int = Field(ge=1, strict=True)
    drop_last: bool = Field(default=False, strict=True)
    microbatches: int = Field(default=MICROBATCHES, ge=1, strict=True)
    accumulate: int = Field(default=1, ge=1, strict=True)
    clip_norm: float | None = Field(default=None, gt=0)
    autocast: Literal["bfloat16", "float16"] | None = None
    loss_scale: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    nan: Literal["stop", "skip"] = "stop"
    compile: str | None = None
    data_workers: int = Field(default=0, ge=0, strict=True)
    epochs: int = Field(default=1, ge=1, strict=True)
    evaluate_every: int | None = Field(default=None, ge=1, strict=True)
    seed: int = Field(default=0, ge=0, lt=2**32, strict=True)
    dtype: Literal["float32", "float64"] = "float32"


def read_config(path: Path) -> RunConfig:
    """Reads a run config. Raises UserError that names file and field."""
    return read_artifact(path, RunConfig)
