"""A small GPT-2 and sentences of several lengths, as a user may have them."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

BATCH_SIZE = 8


def make_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=100, n_positions=32, n_embd=32, n_layer=4, n_head=2)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    config.use_cache = False
    return GPT2LMHeadModel(config).double()


def make_data(examples: int = 40, length: int = 16) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    data = []
    for _ in range(examples):
        words = torch.randint(2, 100, (length,), generator=draw)
        mask = torch.arange(length) < torch.randint(4, length + 1, (1,), generator=draw)
        labels = torch.where(mask, words, -100)
        data.append({"input_ids": words, "attention_mask": mask.long(), "labels": labels})
    return data
