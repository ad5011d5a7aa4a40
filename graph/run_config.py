"""The run config, a YAML file: model, data, loss, optimizer. Format `pipedream-run/1`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from pipedream.graph.choices import MICROBATCHES
from pipedream.graph.errors import ArtifactModel, read_artifact


class Factory(ArtifactModel):
    """A factory to call with the keyword arguments `args`.

    `source`: `torchvision:NAME`, `timm:NAME`, `transformers:NAME` or `package.module:factory`.
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
    """The source of the data: `package.module:factory`, `torchvision-folder:PATH` or
    `huggingface:NAME_OR_PATH`. Paths are relative to the folder of the config.
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
    """Settings for the parameters whose names match a pattern, such as `*.bias`.

    `args` override those of the optimizer. `name` selects another class of torch.optim, which gets
    only the `args` of this group.
    """

    match: tuple[str, ...] = Field(min_length=1)
    name: str | None = None
    args: dict[str, Any] = Field(default_factory=dict)


class OptimizerConfig(ArtifactModel):
    """A class of torch.optim by name, and its keyword arguments.

    A parameter belongs to the first of the `groups` that matches its name in the model. Parameters
    without a match form one more group, the last, with `args`.
    """

    name: str = "SGD"
    args: dict[str, Any] = Field(default={"lr": 0.01})
    groups: tuple[GroupConfig, ...] = ()

    @property
    def names(self) -> str:
        """The names of all classes used, for messages."""
        others = (group.name for group in self.groups if group.name is not None)
        return " and ".join(dict.fromkeys((self.name, *others)))


class AsynchronousConfig(ArtifactModel):
    """Corrections for gradients of weights that have changed since; see docs/asynchronous.md.

    `rate_correction`: the number of updates over which the learning rate of a stage grows from
    rate/delay to the full rate. `weight_prediction`: a minibatch runs on the weights expected at
    the time of its update. `nesterov`: the momentum, such as 0.99, of Nesterov's form of the
    optimizer.
    """

    rate_correction: int | None = Field(default=None, ge=1, strict=True)
    weight_prediction: bool = Field(default=False, strict=True)
    nesterov: float | None = Field(default=None, gt=0, lt=1)


class SchedulerConfig(ArtifactModel):
    """A class of torch.optim.lr_scheduler by name, and its keyword arguments.

    It steps after every epoch or every update. With weight stashing and vertical sync, an update of
    a stage of r replicas counts as r steps, so that all stages follow the same schedule. Arguments
    that are functions are written as `package.module:function`.

    `metric`: what ReduceLROnPlateau observes; by default the mean training loss of each epoch.
    Metrics of the held-out data are updated every `evaluate_every` epochs.
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

    `batch_size`: examples of a minibatch in the pipeline; with the schedules flush, gpipe and 2bw
    an update takes `microbatches` of them. `drop_last`: leave out the last examples of an epoch if
    they do not fill a minibatch; by default they form a smaller one. `loss`: a function of
    torch.nn.functional by name, `package.module:function`, or `output` for a model that returns its
    loss. `data_workers`: processes per rank that read data; 0 for a thread. `sampler`: a sampler
    like those of torch.utils.data; by default each epoch has all examples in a new random order.
    `evaluate_every`: epochs between evaluations on the held-out data, through the pipeline; by
    default one evaluation after the last epoch, on one worker.

    `accumulate`: with weight stashing and vertical sync, the minibatches per replica of one update.
    `clip_norm`: the largest norm of the gradients, over all stages, or over each stage if stages
    update on their own. `autocast`: the type for operators that torch.autocast considers safe.
    `loss_scale`: the factor on the loss that keeps float16 gradients from vanishing; dynamic with
    float16 unless given. `nan`: stop the run at a gradient that is not finite, or skip the update.
    `compile`: the torch.compile backend of each stage.
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
    """Reads a run config. Raises UserError, which names the file and the field."""
    return read_artifact(path, RunConfig)
