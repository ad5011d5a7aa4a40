"""The run config: model, data, loss, optimizer. YAML, `pipedream-run/1`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from pipedream.graph.choices import MICROBATCHES, Correction
from pipedream.graph.errors import ArtifactModel, read_artifact

METRICS = ("tensorboard", "wandb", "mlflow")
"""Packages that a run can give its metrics to."""

_REDUCE_OVERHEAD = "reduce-overhead"
"""torch.compile's name of a mode, not of a backend."""

AUTO = "auto"
"""Instead of a backend of torch.compile: inductor where it was measured to be faster."""

INDUCTOR = "inductor"

BY_GROUPS = "groups:"
"""Before a backend: for each group of operators by itself, equal ones once."""

_SHORT = {
    "none": None,
    "stage": INDUCTOR,
    "groups": BY_GROUPS + INDUCTOR,
    _REDUCE_OVERHEAD: INDUCTOR,
}

_ELEMENTWISE = (
    *("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax"),
    *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
)
"""Optimizers in which what an element of a parameter becomes depends on no other."""

MUON = "Muon"
"""The class of torch.optim that is for the weights of hidden layers alone."""

_FUNCTION = r"[\w.\-]+:[\w.]+"


class Factory(ArtifactModel):
    """Names something to call, and the arguments to call it with."""

    source: str
    """`torchvision:NAME`, `timm:NAME`, `transformers:NAME` or `package.module:factory`, imported
    with the config's folder on the path.
    """
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments."""

    sources: ClassVar[str] = r"[\w.\-]+:[\w.\-/]+"
    examples_of_source: ClassVar[str] = "package.module:factory or torchvision:NAME"

    @field_validator("source")
    @classmethod
    def _check_source(cls, source: str) -> str:
        if re.fullmatch(cls.sources, source) is None:
            raise ValueError(f"write {cls.examples_of_source}, not {source!r}")
        return source


class DataFactory(Factory):
    """Says where the data come from."""

    source: str
    """`package.module:factory`, `torchvision-folder:PATH` or `huggingface:NAME_OR_PATH`. Paths are
    relative to the config's folder.
    """

    examples: int | None = Field(default=None, ge=1, strict=True)
    """Of a stream, such as an IterableDataset: the examples of an epoch. By default its length."""
    varying: bool = Field(default=False, strict=True)
    """Whether minibatches differ in shape, as sentences do in their length. Then all ranks read all
    minibatches that pass through them, and capture the model once for each shape.
    """
    inputs: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Of examples that are dicts: the parts that go to the model, to the parameters of `forward`
    that have these names. By default all tensors but the target.
    """
    target: str | None = None
    """Of examples that are dicts: the part that goes to the loss. By default the first there is of
    `labels`, `label`, `target`, `targets` and `y`.
    """
    collate: str | None = Field(default=None, pattern=f"^{_FUNCTION}$")
    """`package.module:function` that makes a minibatch of a list of examples: a dict, or inputs and
    target. By default torch's default_collate.
    """

    sources = f"(torchvision-folder|huggingface):.+|{_FUNCTION}"
    examples_of_source = "package.module:factory, torchvision-folder:PATH or huggingface:NAME"


class GroupConfig(ArtifactModel):
    """Options of the optimizer for the parameters whose names match a pattern."""

    match: tuple[str, ...] = Field(min_length=1)
    """Patterns of parameter names in the model, such as `*.bias`; `*` stands for any characters.
    A pattern that matches no parameter is an error.
    """
    name: str | None = None
    """Another class of torch.optim for this group."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments. They override those of the optimizer; with a `name` they are the only
    ones.
    """


class OptimizerConfig(ArtifactModel):
    """The optimizer.

    A parameter belongs to the first of the `groups` that matches its name. Parameters that match
    none form one more group, the last, which takes `args` alone.
    """

    name: str = "SGD"
    """A class of torch.optim."""
    args: dict[str, Any] = Field(default={"lr": 0.01})
    """Its keyword arguments."""
    groups: tuple[GroupConfig, ...] = ()
    """Groups of parameters with options of their own."""
    others: dict[str, Any] | None = None
    """With Muon, which is for the weights of hidden layers: keyword arguments of AdamW, which
    learns all other parameters that match no group. Muon's `lr` and `weight_decay` are the default
    with `adjust_lr_fn: match_rms_adamw`; else this is required.
    """

    @model_validator(mode="after")
    def _check_others(self) -> OptimizerConfig:
        if self.others is not None and self.name != MUON:
            raise ValueError(
                f"others: are for AdamW beside {MUON}, and {self.name} learns all parameters:"
                " leave it out, or write groups"
            )
        return self

    @property
    def names(self) -> str:
        """Returns all optimizer classes in use, as text for a message."""
        return " and ".join(self._names)

    @property
    def not_elementwise(self) -> str | None:
        """Returns an optimizer class in use that may have to see whole parameters, if any."""
        return next((name for name in self._names if name not in _ELEMENTWISE), None)

    @property
    def _names(self) -> tuple[str, ...]:
        others = (group.name for group in self.groups if group.name is not None)
        return tuple(dict.fromkeys((self.name, *others)))


class BasisRotationConfig(ArtifactModel):
    """Adam or AdamW of matrices in the eigenbasis of the second moments of their gradients."""

    every: int = Field(default=10, ge=1, strict=True)
    """Updates after which the stage with the latest gradients turns its bases; stages whose
    gradients come sooner do so less often.
    """
    widest: int = Field(default=4_096, ge=2, strict=True)
    """The longest side of a matrix that is rotated: bases take memory and time for its square."""

    def rotates(self, shape: Sequence[int]) -> tuple[bool, bool]:
        """Returns whether a parameter of this shape is rotated from the left, and from the right:
        matrices are, with more than one row and column.
        """
        if len(shape) != 2 or min(shape) < 2:
            return False, False
        rows, columns = shape
        return rows <= self.widest, columns <= self.widest

    def extra_bytes(self, shape: Sequence[int], itemsize: int) -> int:
        """Returns what is kept of such a parameter, with elements of `itemsize` bytes, beyond the
        two tensors of Adam: second moments and basis of each side that is rotated; with narrow
        elements the two tensors in float32, as these are.
        """
        wide, rotated = max(itemsize, 4), self.rotates(shape)
        if not any(rotated):
            return 0
        of_sides = sum(2 * side**2 for side, each in zip(shape, rotated, strict=True) if each)
        return wide * of_sides + 2 * (wide - itemsize) * math.prod(shape)

    def workspace_bytes(self, shape: Sequence[int], itemsize: int) -> int:
        """Returns what an eigendecomposition of the longest side that is rotated needs for a while:
        a copy, the vectors in two orders, and twice as much for LAPACK (syevd).
        """
        sides = [side for side, each in zip(shape, self.rotates(shape), strict=False) if each]
        return 5 * max(itemsize, 4) * max(sides, default=0) ** 2


class AsynchronousConfig(ArtifactModel):
    """Corrections for gradients of weights that have changed since: weight stashing, and of
    `error_feedback` and `basis_rotation` 2bw and vertical-sync, too.

    docs/explanation/late-gradients.md has the formulas.
    """

    rate_correction: int | None = Field(default=None, ge=1, strict=True)
    """Updates over which the learning rate of a stage grows from lr divided by its delay to lr
    (PipeMare).
    """
    weight_prediction: bool = Field(default=False, strict=True)
    """Whether minibatches run on the weights expected at the time of their own update (SpecTrain,
    PipeOptim).
    """
    nesterov: float | None = Field(default=None, gt=0, lt=1)
    """Momentum, such as 0.99, of the Nesterov form of the optimizer, which looks ahead by it."""
    error_feedback: bool | float = Field(default=False)
    """Whether an update that was made in place of one not yet known is made good once it is known;
    a number from 0 to 1: for which part.
    """
    basis_rotation: BasisRotationConfig | None = None
    """Adam and AdamW in a rotated basis; `true` for the defaults of its options."""

    @property
    def with_memory(self) -> frozenset[Correction]:
        """Returns those that take memory, for a plan to count."""
        wanted: dict[Correction, object] = {
            "weight_prediction": self.weight_prediction,
            "error_feedback": self.error_feedback,
            "basis_rotation": self.basis_rotation,
        }
        return frozenset(name for name, each in wanted.items() if each)

    @field_validator("error_feedback")
    @classmethod
    def _check_error_feedback(cls, strength: float) -> float:
        if not 0 <= strength <= 1:
            raise ValueError("write true, false, or a number from 0 to 1")
        return strength

    @field_validator("basis_rotation", mode="before")
    @classmethod
    def _in_full(cls, wanted: Any) -> Any:
        return ({} if wanted else None) if isinstance(wanted, bool) else wanted


class SchedulerConfig(ArtifactModel):
    """The learning rate scheduler. Functions among its arguments: `package.module:function`."""

    name: str
    """A class of torch.optim.lr_scheduler."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments."""
    every: Literal["epoch", "update"] = "epoch"
    """When it steps. An update of a stage of r replicas that learns by itself (weight stashing,
    vertical sync) counts as r steps, so that all stages keep pace.
    """
    metric: Literal["loss", "held_out_loss", "held_out_accuracy"] | None = None
    """What ReduceLROnPlateau looks at; by default `loss`, the mean loss of each epoch. Metrics of
    the held-out data are known as often as `evaluate_every` says.
    """

    @property
    def needs_held_out(self) -> bool:
        return self.metric in ("held_out_loss", "held_out_accuracy")


class MetricsConfig(Factory):
    """Says who gets what the run measures."""

    source: str
    """`tensorboard`, `wandb`, `mlflow`, or `package.module:Class`, a subclass of
    pipedream.MetricsWriter.
    """

    sources = "|".join((*METRICS, _FUNCTION))
    examples_of_source = f"{', '.join(METRICS)} or package.module:Class"


class RunConfig(ArtifactModel):
    """One training run."""

    format: Literal["pipedream-run/1"]
    """Always `pipedream-run/1`."""
    model: Factory
    """What makes the model."""
    data: DataFactory
    """What makes the training set and the held-out set."""
    sampler: Factory | None = None
    """A sampler of torch.utils.data, or one like them, that chooses the examples of an epoch and
    their order. By default each epoch has all examples in a new random order.
    """
    loss: str = "cross_entropy"
    """A function of torch.nn.functional, `package.module:function` of (output, target), or `output`
    where the model takes the target as its last input and returns its own loss, first if it
    returns more.
    """
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer; by default SGD with `lr: 0.01`."""
    asynchronous: AsynchronousConfig = AsynchronousConfig()
    """Corrections for late gradients, with weight stashing; by default none."""
    scheduler: SchedulerConfig | None = None
    """The learning rate scheduler; by default the rate is constant."""
    batch_size: int = Field(ge=1, strict=True)
    """Examples in a minibatch, which travels through the pipeline as one."""
    drop_last: bool = Field(default=False, strict=True)
    """Whether to leave out the examples at the end of an epoch that do not fill a minibatch. By
    default they form a smaller one.
    """
    microbatches: int = Field(default=MICROBATCHES, ge=1, strict=True)
    """Minibatches per update with the schedules flush, gpipe and 2bw."""
    accumulate: int = Field(default=1, ge=1, strict=True)
    """Minibatches per update of each replica with weight stashing and vertical sync: a stage of r
    replicas makes one update of r times as many.
    """
    clip_norm: float | None = Field(default=None, gt=0)
    """The largest norm of the gradients; longer ones are scaled down. With flush, gpipe and 2bw it
    is the norm over the whole model, with weight stashing and vertical sync over each stage. By
    default there is no limit.
    """
    autocast: Literal["bfloat16", "float16"] | None = None
    """The type for operators that torch considers safe in it."""
    loss_scale: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Factor on the loss that keeps float16 gradients from vanishing. By default flush and gpipe
    find it themselves.
    """
    nan: Literal["stop", "skip"] = "stop"
    """What happens when a gradient is not finite: end the run, or leave out the update."""
    compile: str | None = None
    """torch.compile's backend for each stage, such as `inductor`; by default, and with `none`,
    stages run eagerly. `groups:BACKEND` compiles each block of a model by itself, equal ones once;
    `stage` and `groups` stand for inductor, each way. `auto` is what pd-profile has found fastest;
    `reduce-overhead` is inductor with `cuda_graphs`.
    """
    cuda_graphs: bool = False
    """Whether GPUs do passes again as they were recorded, with flush and gpipe."""
    data_workers: int = Field(default=0, ge=0, strict=True)
    """Processes of each rank that read its data; with 0 a thread does."""
    metrics: tuple[MetricsConfig, ...] = ()
    """Who gets what the run measures, beside metrics.jsonl: such as `metrics: wandb`, or a list of
    names, each with its `args` or without.
    """
    epochs: int = Field(default=1, ge=1, strict=True)
    """Passes over the data."""
    evaluate_every: int | None = Field(default=None, ge=1, strict=True)
    """Epochs between evaluations on the held-out data, through the pipeline. By default it is
    evaluated once, after the last epoch, on one worker.
    """
    held_out_metrics: dict[str, str] = Field(default_factory=dict)
    """Metrics on the held-out data beside loss and accuracy, by name: `package.module:function` of
    (output, target), which returns `(sum, count)`: a sum over the examples of a minibatch, and of
    how many values. The metric is the sum of all sums divided by the sum of all counts.
    """
    seed: int = Field(default=0, ge=0, lt=2**32, strict=True)
    """Seed of the initial weights, the order of the data and dropout, which are then the same under
    every plan.
    """
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Type of the weights and of floating-point inputs."""
    zero: bool | None = Field(default=None, strict=True)
    """Whether the replicas of a stage divide the optimizer's state among them (ZeRO-1): each keeps
    that of its part of the parameters, updates these, and receives the others. By default each
    stage does what the plan says.
    """

    @property
    def compile_backend(self) -> str | None:
        """Returns torch.compile's backend, None for none; with `auto` the plan says which."""
        return backend_of(self.compile)

    @property
    def records_passes(self) -> bool:
        """Returns whether passes are CUDA graphs."""
        return self.cuda_graphs or self.compile == _REDUCE_OVERHEAD

    @property
    def watches_norm(self) -> bool:
        """Tells whether updates need the norm of the gradients, to clip or to check them."""
        return self.clip_norm is not None or self.leaves_out

    @property
    def leaves_out(self) -> bool:
        """Tells whether an update is left out if its gradients are not finite."""
        searched = self.autocast == "float16" and self.loss_scale is None
        return self.nan == "skip" or searched or self.loss_scale not in (None, 1.0)

    @field_validator("held_out_metrics")
    @classmethod
    def _check_metrics(cls, named: dict[str, str]) -> dict[str, str]:
        for name, source in named.items():
            if not name.isidentifier() or name in ("loss", "accuracy"):
                raise ValueError(f"{name!r} names no metric of your own: write a word, such as f1")
            if re.fullmatch(_FUNCTION, source) is None:
                raise ValueError(f"{name}: write package.module:function, not {source!r}")
        return named

    @field_validator("metrics", mode="before")
    @classmethod
    def _in_full(cls, metrics: Any) -> Any:
        """A name stands for a list of it, and in a list for one without arguments."""
        listed = metrics if isinstance(metrics, (list, tuple)) else [metrics]
        return [{"source": each} if isinstance(each, str) else each for each in listed]


def backend_of(compile: str | None) -> str | None:
    """Returns the backend, after BY_GROUPS or alone, that a word for it stands for; else `compile`
    itself.
    """
    return compile if compile is None else _SHORT.get(compile, compile)


def read_config(path: Path) -> RunConfig:
    """Reads a run config. Raises UserError that names file and field."""
    return read_artifact(path, RunConfig)
