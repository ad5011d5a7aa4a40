"""PipelineTrainer on two ranks beside Trainer on one: the same losses, metrics and checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plans import cut, make_plan
from processes import free_port, run_processes

from pipedream.capture.errors.user_code import import_torchvision
from pipedream.capture.export import capture
from pipedream.comm.rank_info import RankInfo

BASE: Mapping[str, Any] = {
    "per_device_train_batch_size": 6,
    "per_device_eval_batch_size": 6,
    "num_train_epochs": 1,
    "learning_rate": 1e-2,
    "max_grad_norm": 0.5,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
}

CASES: Mapping[str, Mapping[str, Any]] = {
    "evaluated and saved": {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_right",
        "weight_decay": 0.1,
        "lr_scheduler_type": "cosine",
    },
    "accumulated and smoothed": {
        "gradient_accumulation_steps": 2,
        "label_smoothing_factor": 0.1,
        "optim": "adafactor",
        "eval_strategy": "epoch",
        "include_num_input_tokens_seen": True,
    },
}


RESUMED = "resumed"
"""A run with dropout that goes on from its checkpoint."""


def _transformers() -> Any:
    import_torchvision()  # where torch is a build without its operators, its import fails
    import transformers

    return transformers


def _model(dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    config = _transformers().GPT2Config(
        vocab_size=30, n_positions=8, n_embd=16, n_layer=2, n_head=2, use_cache=False
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = dropout
    return _transformers().GPT2LMHeadModel(config).double()


def _data(examples: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Sentences of several lengths, so that a mean over tokens is none over examples."""
    draw = torch.Generator().manual_seed(seed)
    data = []
    for _ in range(examples):
        words = torch.randint(1, 30, (8,), generator=draw)
        mask = torch.arange(8) < torch.randint(3, 9, (1,), generator=draw)
        labels = torch.where(mask, words, -100)
        data.append({"input_ids": words, "attention_mask": mask.long(), "labels": labels})
    data[0]["labels"][:] = -100  # an example in which nothing counts
    return data


def _right(prediction: Any) -> dict[str, float]:
    guessed, labels = prediction.predictions[:, :-1].argmax(-1), prediction.label_ids[:, 1:]
    return {"right": float((guessed == labels)[labels != -100].mean())}


def _train(make: Callable[..., Any], folder: Path, name: str) -> Any:
    arguments = _transformers().TrainingArguments(str(folder / name), **{**BASE, **CASES[name]})
    trainer = make(
        model=_model(),
        args=arguments,
        train_dataset=_data(16, 1),
        eval_dataset=_data(10, 2),  # the last minibatch is smaller
        compute_metrics=None if arguments.prediction_loss_only else _right,
    )
    trainer.train()
    predicted = trainer.predict(_data(4, 3))
    log = [_numbers(step) for step in trainer.state.log_history]
    return log, _numbers(predicted.metrics), predicted.predictions


def _numbers(log: Mapping[str, Any]) -> dict[str, float]:
    """What does not depend on how long it took."""
    timed = ("runtime", "per_second", "total_flos", "preparation_time")
    return {key: float(value) for key, value in log.items() if not key.endswith(timed)}


def _resumed(make: Callable[..., Any], folder: Path) -> list[float]:
    """The losses of a run with dropout, and of one that goes on from its checkpoint."""
    settings = {**BASE, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    losses = []
    for begin in (None, str(folder / "whole/checkpoint-2")):
        arguments = _transformers().TrainingArguments(
            str(folder / ("rest" if begin else "whole")), **settings
        )
        trainer = make(model=_model(0.1), args=arguments, train_dataset=_data(16, 1))
        trainer.train(resume_from_checkpoint=begin)
        losses.append([each["loss"] for each in trainer.state.log_history if "loss" in each][-2:])
    assert losses[0] == losses[1]
    return losses[0]


def _plain(rank: int, ranks: int, folder: Path, name: str) -> Any:
    return _train(_transformers().Trainer, folder / "plain", name)


def _piped(rank: int, ranks: int, folder: Path, name: str, plan: Any, port: int) -> Any:
    os.environ |= RankInfo(rank, ranks, rank, ranks, "127.0.0.1", port).variables()
    _transformers()
    from pipedream.adapters.transformers import PipelineTrainer

    make = partial(PipelineTrainer, plan=plan, microbatches=2)
    if name == RESUMED:
        return _resumed(make, folder)
    return _train(make, folder / "piped", name)


def _plan(smoothed: bool, dropout: float = 0.0) -> Any:
    batch = torch.utils.data.default_collate(_data(4, 1))
    if smoothed:  # the model does not get the labels
        batch.pop("labels")
    graph = capture(_model(dropout), (), batch).graph
    return make_plan(graph, cut(graph, 2), (1, 1), "flush")


def _results(_: int, __: int, folder: Path, name: str, plan: Any, port: int) -> tuple[Any, Any]:
    """What two ranks and one process come to, forked off this one: the imports take seconds."""
    _transformers()
    import pipedream.adapters.transformers  # noqa: F401

    piped = run_processes(_piped, 2, folder, name, plan, port, seconds=200.0, fork=True)
    if name == RESUMED:
        return piped, None
    (plain,) = run_processes(_plain, 1, folder, name, seconds=100.0, fork=True)
    return piped, plain


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [*CASES, RESUMED])
def test_what_trainer_does_is_done_on_two_ranks(name: str, tmp_path: Path) -> None:
    """Evaluation, metrics, predictions, smoothed labels, accumulation, the best model, resuming."""
    smoothed = "label_smoothing_factor" in CASES.get(name, {})
    plan = _plan(smoothed, dropout=0.1 if name == RESUMED else 0.0)
    (results,) = run_processes(_results, 1, tmp_path, name, plan, free_port(), seconds=320.0)
    piped, plain = results
    if name == RESUMED:
        assert piped[0] == piped[1]
        return
    plain_log, plain_metrics, plain_predictions = plain
    for log, metrics, predictions in piped:
        assert len(log) == len(plain_log)
        for here, there in zip(log, plain_log, strict=True):
            assert here == pytest.approx(there, rel=1e-6, abs=1e-6)
        assert metrics == pytest.approx(plain_metrics, rel=1e-6, abs=1e-6)
        np.testing.assert_allclose(predictions, plain_predictions, atol=1e-5)
