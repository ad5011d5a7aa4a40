"""A loop with Accelerate, as a pipeline: torchrun --nproc-per-node 2 accelerate_pipeline.py."""

import json

import torch
from accelerate import Accelerator
from tokens import BATCH_SIZE, make_data, make_model
from torch.utils.data import DataLoader

from pipedream import Pipeline
from pipedream.adapters.transformers import tokens

accelerator = Accelerator(cpu=True)
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(make_data(), BATCH_SIZE)
pipeline = Pipeline(model, "plan/plan.json", weigh=tokens(model))
losses = []
for _ in range(2):
    for batch in loader:
        loss = pipeline(**batch)
        accelerator.backward(loss)
        pipeline.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
if accelerator.is_main_process:
    with open("losses.json", "w") as file:
        json.dump(losses, file)
