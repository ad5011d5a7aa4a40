"""Which architectures of transformers are profiled, planned and trained as they are?

`python scripts/bench/architectures/stepped_models.py [NAME]...` takes those of captured_models.py,
in small configurations, and heads with labels: pipedream.profile, pipedream.optimize for two
workers in a row, and three steps of a Pipeline on two processes. A model counts where its losses
are those of the same three steps on one process, dropout included.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from captured_models import DECODER, ENCODER, T5, TRANSFORMERS, TWO_SIDED, Case
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import pipedream
from pipedream.capture.errors.user_code import import_torchvision
from pipedream.capture.sources.load import load
from pipedream.comm.rank_info import LOCALHOST, RankInfo, free_port
from pipedream.graph.plan import Plan

BATCH, STEPS, LIMIT = 4, 3, 120.0
CLOSE = 1e-5
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 100}
HEADS = [
    Case(name, {**args, "use_cache": False})
    for name, args in (
        ("GPT2LMHeadModel", GPT),
        ("GPTNeoXForCausalLM", ENCODER),
        ("LlamaForCausalLM", DECODER),
        ("LlamaForSequenceClassification", {**DECODER, "pad_token_id": 0}),
        ("MistralForCausalLM", DECODER),
        ("Qwen2ForCausalLM", {**DECODER, "tie_word_embeddings": True}),
        ("BertForMaskedLM", ENCODER),
        ("BertForSequenceClassification", ENCODER),
        ("RobertaForTokenClassification", {**ENCODER, "pad_token_id": 0}),
        ("T5ForConditionalGeneration", {**T5, "decoder_start_token_id": 0}),
        ("BartForConditionalGeneration", TWO_SIDED),
        ("PegasusForConditionalGeneration", TWO_SIDED),
    )
]
"""Each with tokens and labels, which are classes of examples for some."""


def loss(output: Any, _target: Any) -> Tensor:
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    learning = [leaf for leaf in leaves if leaf.is_floating_point() and leaf.requires_grad]
    return torch.stack([leaf.float().square().mean() for leaf in learning]).sum()


def example(case: Case) -> tuple[nn.Module, dict[str, Any]]:
    """The model and its inputs by name."""
    torch.manual_seed(0)
    if case in HEADS:
        return head(case)
    loaded = load(case.source, {**case.args, **case.noted}, BATCH, case.inputs)
    names = list(inspect.signature(loaded.model.forward).parameters)
    return loaded.model, dict(zip(names, loaded.args, strict=False)) | loaded.kwargs


def head(case: Case) -> tuple[nn.Module, dict[str, Any]]:
    import_torchvision()
    import transformers

    kind = getattr(transformers, case.source)
    tokens = torch.randint(2, 100, (BATCH, 12))
    classes = torch.randint(0, 2, (BATCH,) if "Sequence" in case.source else (BATCH, 12))
    labels = classes if "Classification" in case.source else tokens
    return kind(kind.config_class(**case.args)).train(), {"input_ids": tokens, "labels": labels}


def train(case: Case, plan: Plan, info: RankInfo, answers: Any) -> None:
    torch.set_num_threads(1)
    os.environ |= info.variables()
    model, inputs = example(case)
    pipeline = pipedream.Pipeline(model, plan, loss, microbatches=2, device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(STEPS):
        value = pipeline(**inputs)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    answers.put((info.rank, losses))


def losses(case: Case, plan: Plan) -> list[float]:
    context, port, workers = multiprocessing.get_context("fork"), free_port(), plan.workers
    answers = context.Queue()
    infos = [RankInfo(rank, workers, rank, workers, LOCALHOST, port) for rank in range(workers)]
    ranks = [context.Process(target=train, args=(case, plan, info, answers)) for info in infos]
    for rank in ranks:
        rank.start()
    try:
        found = dict(answers.get(timeout=LIMIT) for _ in ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    return list(found[0])


def try_out(case: Case) -> str:
    """Returns what is wrong, or nothing."""
    model, inputs = example(case)
    profiled = pipedream.profile(model, inputs, repeats=1, warmup=1)
    options: Mapping[str, Any] = {"bandwidth": "10GB/s", "schedule": "flush"}
    two = pipedream.optimize(profiled, machines=2, straight=True, **options).plan
    one = pipedream.optimize(profiled, machines=1, **options).plan
    expected, found = losses(case, one), losses(case, two)
    if two.replicas != (1, 1):
        return f"planned as {two.replicas}"
    worst = max(abs(a - b) / max(abs(a), 1e-6) for a, b in zip(expected, found, strict=True))
    return "" if worst < CLOSE else f"losses {found} in place of {expected}"


def main() -> None:
    torch.set_num_threads(1)
    wanted = sys.argv[1:]
    cases = [
        case for case in TRANSFORMERS + HEADS if not wanted or case.source.split(":")[-1] in wanted
    ]
    good = 0
    for case in cases:
        begin = time.perf_counter()
        try:
            wrong = try_out(case)
        except Exception as error:
            wrong = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        good += not wrong
        print(f"{case.name}: {wrong or 'yes'} ({time.perf_counter() - begin:.0f} s)", flush=True)
    print(f"{good} of {len(cases)}")


if __name__ == "__main__":
    main()
