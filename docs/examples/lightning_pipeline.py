"""A LightningModule, as a pipeline: torchrun --nproc-per-node 2 lightning_pipeline.py."""

import json
from itertools import pairwise

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pipedream.adapters.lightning import Pipeline, PipelineStrategy


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        widths = [8, 32, 32, 32, 3]
        layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
        self.model = nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))
        self.losses: list[float] = []

    def configure_model(self) -> None:
        self.pipeline = Pipeline(self.model, "plan/plan.json", "cross_entropy")

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        x, y = batch
        loss = self.pipeline(x, target=y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


lightning.seed_everything(0)
data = TensorDataset(torch.randn(160, 8), torch.randint(3, (160,)))
module = Classifier()
settings = {"accelerator": "cpu", "max_epochs": 2, "gradient_clip_val": 0.1, "logger": False}
trainer = lightning.Trainer(devices=2, strategy=PipelineStrategy(), **settings)
trainer.fit(module, DataLoader(data, batch_size=16))
if trainer.is_global_zero:
    with open("losses.json", "w") as file:
        json.dump(module.losses, file)
