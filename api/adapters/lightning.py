"""Lightning for a module whose training step calls a `Pipeline`."""

from __future__ import annotations

from typing import Any

import lightning
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy

from pipedream.graph.errors import UserError
from pipedream.runtime.pipeline import Pipeline

__all__ = ["Pipeline", "PipelineStrategy"]

_CALLS = "pipeline_calls"
"""In a checkpoint: of how many calls dropout has drawn."""

_PRECISIONS = ("32-true", "64-true", "bf16-true", "bf16-mixed")
_AVERAGING = ("StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging")


class PipelineStrategy(DDPStrategy):
    """Starts the ranks as DDPStrategy does, and leaves model, gradients and data to a `Pipeline`.

    The LightningModule makes the pipeline in `configure_model`; `training_step` returns what it
    returns. All ranks read the same minibatches. gradient_clip_val is the norm of the whole model's
    gradient. Checkpoints have the weights of all stages and the optimizer states of all ranks.
    precision="bf16-mixed" goes with a pipeline of autocast="bfloat16". What is not supported is
    refused by its name.
    """

    def configure_ddp(self) -> None:
        """Clips through the pipeline, instead of wrapping the model."""
        plugin: Any = self.precision_plugin
        plugin.clip_grad_by_norm = lambda _optimizer, norm: self._pipeline().clip_grad_norm_(norm)

    def model_to_device(self) -> None:
        """The pipeline moves what this rank computes."""

    def setup(self, trainer: lightning.Trainer) -> None:
        self._check(trainer)
        # As with use_distributed_sampler=False: it would divide the data among the ranks.
        trainer._accelerator_connector.use_distributed_sampler = False
        super().setup(trainer)

    def _check(self, trainer: lightning.Trainer) -> None:
        """Raises UserError for what a pipeline would have to ignore."""
        precision: Any = self.precision_plugin.precision
        refused = [f"{name}=" for name in self._ddp_kwargs]
        if precision not in _PRECISIONS:
            refused.append(f"precision={precision!r}")
        if self._layer_sync is not None:
            refused.append("sync_batchnorm")
        if self._ddp_comm_hook is not None:
            refused.append("ddp_comm_hook")
        refused += [
            f"the callback {type(each).__name__}"
            for each in getattr(trainer, "callbacks", [])
            if any(kind.__name__ in _AVERAGING for kind in type(each).__mro__)
        ]
        for name in refused:
            raise UserError(f"PipelineStrategy: {name} is not supported: leave it out")

    def on_train_end(self) -> None:
        """Brings all ranks up to date: what follows may begin with the weights of one."""
        self._pipeline().gather()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._pipeline().gather()
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        own = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return self._pipeline().optimizer_state(own)

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        checkpoint[_CALLS] = self._pipeline().rng.epoch
        super().save_checkpoint(checkpoint, *args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        super().load_optimizer_state_dict(checkpoint)
        self._pipeline().rng.epoch = checkpoint.get(_CALLS, 0)

    def _pipeline(self) -> Pipeline:
        found = [each for each in vars(self.lightning_module).values() if type(each) is Pipeline]
        if len(found) != 1:
            raise UserError(
                f"PipelineStrategy: the LightningModule has {len(found)} pipelines: make one in its"
                " configure_model"
            )
        return found[0]
