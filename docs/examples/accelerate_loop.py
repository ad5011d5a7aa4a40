"""A loop with Accelerate, on one device."""

import json

import torch
from accelerate import Accelerator
from tokens import BATCH_SIZE, make_data, make_model
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True)
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(make_data(), BATCH_SIZE)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for _ in range(2):
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
if accelerator.is_main_process:
    with open("losses.json", "w") as file:
        json.dump(losses, file)
