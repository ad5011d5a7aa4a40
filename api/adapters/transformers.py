"""A Trainer of Hugging Face's transformers that trains a model as a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer

from pipedream.graph.choices import MICROBATCHES
from pipedream.graph.errors import UserError
from pipedream.graph.plan import Plan
from pipedream.runtime.pipeline import Pipeline

_IGNORED = -100
"""The label that the losses of transformers leave out."""


class PipelineTrainer(Trainer):
    """A Trainer whose model runs as the pipeline of `plan`, one stage or more on each rank.

    All ranks read the same minibatches of `per_device_train_batch_size` examples, and cut them into
    `microbatches`. The model has to return its loss. Checkpoints have the weights, as those of one
    process, but no optimizer states. Not supported: resume_from_checkpoint, compute_metrics.
    """

    pipeline: Pipeline

    def __init__(
        self, *args: Any, plan: Plan | str | Path, microbatches: int = MICROBATCHES, **kwargs: Any
    ) -> None:
        """The other arguments are Trainer's. Raises UserError if the plan is for other ranks."""
        super().__init__(*args, **kwargs)
        for name in ("fp16", "fp16_full_eval", "bf16_full_eval"):
            if getattr(self.args, name):
                raise UserError(f"{name}: not supported by a pipeline: use bf16=True, or float32")
        self.args.average_tokens_across_devices = False  # all devices have the same tokens
        self.args.save_only_model = True
        accelerator: Any = self.accelerator
        accelerator.prepare_model = lambda model, **_: model
        accelerator.prepare_data_loader = self._same_on_all_ranks
        accelerator.clip_grad_norm_ = lambda _parameters, norm, **_: self.pipeline.clip_grad_norm_(
            norm
        )
        assert isinstance(self.model, nn.Module)
        config: Any = self.model.config
        config.use_cache = False
        self.count = tokens(self.model)
        self.pipeline = Pipeline(
            self.model,
            plan,
            weigh=self.count,
            microbatches=microbatches,
            device=self.args.device.type,
            autocast="bfloat16" if self.args.bf16 else None,
            seed=self.args.seed,
        )

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """The pipeline moves what this rank computes."""

    def _same_on_all_ranks(self, loader: DataLoader[Any], **_: Any) -> Any:
        """As Accelerate prepares it for a single process."""
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

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if resume_from_checkpoint:
            raise UserError(
                "resume_from_checkpoint: checkpoints of PipelineTrainer have no optimizer states;"
                " pd-train --resume goes on where a run was"
            )
        return super().train(None, *args, **kwargs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """The loss, as that of one process: a mean over all tokens that count."""
        if return_outputs:
            raise UserError("compute_loss: a pipeline returns the loss alone, without outputs")
        weights = None
        if num_items_in_batch is not None:
            weights = self.count(**inputs) / float(num_items_in_batch)
        return self.pipeline(weights=weights, **inputs)

    def prediction_step(
        self, model: nn.Module, inputs: Mapping[str, Any], *_: Any, **__: Any
    ) -> tuple[Tensor, None, None]:
        return self.pipeline.evaluate(**inputs), None, None

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        self.pipeline.gather()
        super().save_model(*args, **kwargs)


def tokens(model: nn.Module) -> Callable[..., Tensor]:
    """What the loss of a model of transformers is a mean over: a function of the model's inputs
    that returns how many tokens with a label each example has, or 1, as a tensor [examples].
    """
    name = type(model).__name__
    shifted = "CausalLM" in name or "LMHead" in name  # no label for the first token

    def count(labels: Tensor | None = None, **inputs: Any) -> Tensor:
        if labels is None or labels.is_floating_point() or labels.dim() < 2:
            given = (labels, *inputs.values())
            examples = next(len(value) for value in given if isinstance(value, Tensor))
            return torch.ones(examples, dtype=torch.float64)
        counted = labels[..., 1:] if shifted else labels
        return counted.ne(_IGNORED).flatten(1).sum(1).double()

    return count
