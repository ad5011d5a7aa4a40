"""Lightning for a module whose training step calls a `Pipeline`."""

from __future__ import annotations

from typing import Any

import lightning
from lightning.pytorch.strategies import DDPStrategy

from pipedream.runtime.pipeline import Pipeline

__all__ = ["Pipeline", "PipelineStrategy"]


class PipelineStrategy(DDPStrategy):
    """Starts the ranks as DDPStrategy does, and leaves model, gradients and data to a `Pipeline`.

    The LightningModule makes the pipeline in `configure_model`; `training_step` returns what it
    returns. All ranks read the same minibatches. gradient_clip_val is the norm of the whole model's
    gradient. Checkpoints have the weights of all stages, and optimizer states of rank 0
    alone.
    """

    def configure_ddp(self) -> None:
        """Clips through the pipeline, instead of wrapping the model."""
        plugin: Any = self.precision_plugin
        plugin.clip_grad_by_norm = lambda _optimizer, norm: self._pipeline().clip_grad_norm_(norm)

    def model_to_device(self) -> None:
        """The pipeline moves what this rank computes."""

    def setup(self, trainer: lightning.Trainer) -> None:
        # As with use_distributed_sampler=False: it would divide the data among the ranks.
        trainer._accelerator_connector.use_distributed_sampler = False
        super().setup(trainer)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._pipeline().gather()
        return super().lightning_module_state_dict()

    def _pipeline(self) -> Pipeline:
        found = [each for each in vars(self.lightning_module).values() if type(each) is Pipeline]
        assert found, "configure_model of the LightningModule has to make a Pipeline"
        return found[0]
