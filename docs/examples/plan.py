"""Profiles the model and plans it for two workers: once, before the training."""

from tokens import BATCH_SIZE, make_data, make_model
from torch.utils.data import default_collate

import pipedream

batch = default_collate(make_data()[:BATCH_SIZE])
profiled = pipedream.profile(make_model(), batch, seconds=2)
plan = pipedream.optimize(profiled, 2, "1GB/s", schedule="flush", straight=True)
plan.write("plan")
