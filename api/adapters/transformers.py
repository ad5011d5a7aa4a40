"""A Trainer of Hugging Face's transformers that trains a model as a pipeline."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from pipedream.adapters.trainer_arguments import check
from pipedream.graph.choices import MICROBATCHES
from pipedream.graph.plan import Plan
from pipedream.runtime.pipeline import Pipeline

_IGNORED = -100
"""The label that the losses of transformers leave out."""

_CALLS = "pipeline.json"
"""Beside a checkpoint: of how many calls dropout has drawn."""


class PipelineTrainer(Trainer):
    """A Trainer whose model runs as the pipeline of `plan`, one stage or more on each rank.

    All ranks read the same minibatches of `per_device_train_batch_size` examples, and cut them into
    `microbatches`. Losses, metrics and checkpoints are those of one process, which can go on from
    them. What is not supported is refused by its name: see `trainer_arguments`.
    """

    pipeline: Pipeline

    def __init__(
        self,
        *args: Any,
        plan: Plan | str | Path,
        microbatches: int = MICROBATCHES,
        loss: Callable[[Any, Any], Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        """`loss` of what the model returns and the labels, which it does not get then: a mean over
        tokens with a label, or over the examples. By default the model returns its loss. The other
        arguments are Trainer's. Raises UserError for what is not supported, or a plan for other
        ranks.
        """
        given = inspect.signature(Trainer.__init__).bind(self, *args, **kwargs).arguments
        check(
            given.get("args") or TrainingArguments("tmp_trainer"),
            given,
            type(self),
            PipelineTrainer,
        )
        super().__init__(*args, **kwargs)
        self._be_one_process()
        assert isinstance(self.model, nn.Module)
        config: Any = getattr(self.model, "config", None)
        if config is not None:
            config.use_cache = False
        self.count = tokens(self.model)
        if loss is None and self.label_smoother is not None:
            loss = self._smoothed
        self.takes_labels = loss is None
        self.pipeline = Pipeline(
            self.model,
            plan,
            loss or "output",
            microbatches=microbatches,
            device=self.args.device.type,
            autocast="bfloat16" if self.args.bf16 else None,
            seed=self.args.seed,
        )

    def _be_one_process(self) -> None:
        """Makes Trainer gather nothing from the ranks: all have the same minibatches."""
        self.args.average_tokens_across_devices = False  # all devices have the same tokens
        accelerator: Any = self.accelerator
        accelerator.prepare_model = self._as_it_is
        accelerator.prepare_data_loader = self._same_on_all_ranks
        accelerator.gather = lambda tensors: tensors
        accelerator.pad_across_processes = lambda tensors, *_, **__: tensors
        accelerator.clip_grad_norm_ = lambda _parameters, norm, **_: self.pipeline.clip_grad_norm_(
            norm
        )

    def _as_it_is(self, model: nn.Module, **_: Any) -> nn.Module:
        models: list[Any] = self.accelerator._models
        models.append(model)
        return model

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """The pipeline moves what this rank computes."""

    def _same_on_all_ranks(self, loader: DataLoader[Any], **_: Any) -> Any:
        """Prepares a loader as Accelerate does for a single process."""
        seed = self.args.data_seed
        return prepare_data_loader(
            loader,
            num_processes=1,
            process_index=0,
            use_seedable_sampler=True,
            data_seed=self.args.seed if seed is None else seed,
        )

    def _wrap_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        return model

    def get_total_train_batch_size(self, args: Any) -> int:
        return int(self._train_batch_size * args.gradient_accumulation_steps)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The loss, as that of one process: a mean over all tokens that count."""
        arguments = self._arguments(inputs, num_items_in_batch)
        if return_outputs:
            return self.pipeline.predict(**arguments)
        return self.pipeline(**arguments)

    def _arguments(self, inputs: Mapping[str, Any], items: Tensor | int | None) -> dict[str, Any]:
        counted = self.count(**inputs)
        arguments = dict(
            inputs, weights=counted / (counted.sum() if items is None else float(items))
        )
        if not self.takes_labels:
            arguments["target"] = arguments.pop("labels", None)
        return arguments

    def _items_evaluated(self, inputs: dict[str, Any]) -> Tensor | int | None:
        """What Trainer divides the loss of a minibatch by in evaluation; for some models it counts
        the first token, too. Earlier versions leave it to the model.
        """
        if "num_items_in_batch" not in Trainer.prediction_step.__code__.co_varnames:
            return None
        items: Tensor | int | None = self._get_num_items_in_batch([inputs], self.args.device)
        return items

    def _smoothed(self, outputs: Any, labels: Tensor) -> Tensor:
        assert self.label_smoother is not None
        loss: Tensor = self.label_smoother(outputs, labels, shift_labels=is_causal(self.model))
        return loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        inputs = self._prepare_inputs(inputs)
        arguments = self._arguments(inputs, self._items_evaluated(inputs))
        if prediction_loss_only:
            return self.pipeline.evaluate(**arguments), None, None
        labels = [inputs.get(name) for name in self.label_names]
        known = bool(labels) and all(each is not None for each in labels)
        loss, outputs = self.pipeline.predict(**arguments, with_loss=known)
        config = getattr(self.model, "config", None)
        ignored = ignore_keys or getattr(config, "keys_to_ignore_at_inference", [])
        if isinstance(outputs, Mapping):
            logits = tuple(v for key, v in outputs.items() if key not in [*ignored, "loss"])
        else:
            logits = outputs[1:] if known and self.takes_labels else outputs
        return loss, _alone(logits), _alone(tuple(labels)) if known else None

    def store_flos(self) -> None:
        """Each rank has counted those of the whole model."""
        self.state.total_flos += self.current_flos
        self.current_flos = 0

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        self.pipeline.gather()
        super().save_model(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """As one process does, of the states of all ranks."""
        assert self.optimizer is not None
        optimizer: Any = self.optimizer
        whole = self.pipeline.optimizer_state(optimizer)
        optimizer.state_dict = lambda: whole
        try:
            super()._save_optimizer_and_scheduler(output_dir)
        finally:
            del optimizer.state_dict
        if self.args.should_save:
            Path(output_dir, _CALLS).write_text(json.dumps({"calls": self.pipeline.rng.epoch}))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and (path := Path(checkpoint, _CALLS)).exists():
            self.pipeline.rng.epoch = int(json.loads(path.read_text())["calls"])


def _alone(values: Any) -> Any:
    """Returns the value of a tuple of one, or the values as they are."""
    return values[0] if isinstance(values, tuple) and len(values) == 1 else values


def is_causal(model: Any) -> bool:
    """Whether the loss of a model of transformers has no label for the first token."""
    name, config = type(model).__name__, getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        return False
    kind = getattr(model, "loss_type", None)
    return (
        "CausalLM" in name
        or "LMHead" in name
        or kind in ("ForCausalLM", "ForConditionalGeneration")
    )


def tokens(model: nn.Module) -> Callable[..., Tensor]:
    """What the loss of a model of transformers is a mean over: a function of the model's inputs
    that returns how many tokens with a label each example has, or 1, as a tensor [examples].
    """
    shifted = is_causal(model)

    def count(labels: Tensor | None = None, **inputs: Any) -> Tensor:
        if labels is None or labels.is_floating_point() or labels.dim() < 2:
            given = (labels, *inputs.values())
            examples = next(len(value) for value in given if isinstance(value, Tensor))
            return torch.ones(examples, dtype=torch.float64)
        counted = labels[..., 1:] if shifted else labels
        return counted.ne(_IGNORED).flatten(1).sum(1).double()

    return count
