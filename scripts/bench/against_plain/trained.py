"""One way of one model trained by pipedream, in processes of its own with a time limit."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import yaml
from compared_models import MODELS, library, next_words
from plain_loop import (
    AUTOCAST,
    LEARNING_RATE,
    MOMENTUM,
    SEED,
    Learnt,
    collated,
    make_model,
)
from safetensors.torch import load_file
from torch.nn import functional
from ways import MICROBATCHES, MINIBATCHES, Way, make_plan, run_config

from pipedream import Pipeline
from pipedream.capture.captured import Captured
from pipedream.capture.compute_settings import Precision
from pipedream.capture.export import capture
from pipedream.capture.sources.load import load_config_model
from pipedream.comm.rank_info import RankInfo
from pipedream.graph.errors import UserError
from pipedream.graph.plan import read_plan, write_plan
from pipedream.graph.run_config import read_config
from pipedream.runtime import cli
from pipedream.runtime.data.examples import Examples
from pipedream.runtime.local import local_model
from pipedream.runtime.local.captures import Captures, capture_all
from pipedream.runtime.run.job import Job
from pipedream.runtime.supervise.launch import USER_ERROR, spawn

CPU = torch.device("cpu")
LOSSES = {"output": None, "cross_entropy": functional.cross_entropy}
PLAN, CONFIG, RUN = "plan.json", "run.yaml", "run"


def _tokens() -> Callable[..., Any]:
    tokens: Callable[..., Any] = library("pipedream.adapters.transformers").tokens
    return tokens


class Failed(Exception):
    """What a run has come to if it has not trained: `why`, and whether it was a refusal."""

    def __init__(self, why: str, refused: bool) -> None:
        super().__init__(why)
        self.why, self.refused = why, refused


def loss_function(name: str) -> Callable[..., torch.Tensor] | None:
    """None where the model computes it itself."""
    return LOSSES.get(MODELS[name].loss, next_words)


class Trainings:
    """Of one model in one precision; what the ways have in common is captured once. `unchecked`:
    without the self-check at the start.
    """

    def __init__(self, name: str, precision: str, folder: Path, unchecked: bool = False) -> None:
        self.name, self.precision, self.unchecked = name, precision, unchecked
        self.folder = folder / f"{name}-{precision}"
        self.compared = MODELS[name]
        self.captured: dict[str, Captured] = {}
        self.captures: dict[str, Captures] = {}
        self.uncaptured: dict[str, str] = {}

    def train(self, title: str, way: Way, seconds: float) -> Learnt:
        """Raises Failed."""
        folder = self.folder / title.replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "log.txt"
        if why := self.uncaptured.get(way.minibatches):
            raise Failed(why, refused=True)
        try:
            work = self._prepare(folder, way)
        except UserError as error:
            self.uncaptured[way.minibatches] = error.format_message()
            raise Failed(error.format_message(), refused=True) from error
        code = in_time(work, log, seconds)
        if code is None:
            raise Failed(f"took more than {seconds:g} s", refused=False)
        if code:
            lines = [line for line in log.read_text().splitlines() if line.strip()]
            last = lines[-1] if lines else "says nothing"
            raise Failed(last.removeprefix("pd-train: "), refused=code == USER_ERROR)
        return learnt_by_pipeline(folder) if way.by_pipeline else learnt_by_command(folder)

    def _prepare(self, folder: Path, way: Way) -> Callable[[], int]:
        if way.by_pipeline:
            captured = self._captured_for_pipeline()
            if self.compared.loss == "output":
                _tokens()  # imported before ranks are forked
            write_plan(make_plan(captured, way, self.compared.shard), folder / PLAN)
            return partial(spawn, partial(self._loop, folder), sum(way.replicas))
        sgd = {"lr": LEARNING_RATE, "momentum": MOMENTUM}
        config = run_config(self.name, self.compared.loss, self.precision, way, SEED, **sgd)
        (folder / CONFIG).write_text(yaml.safe_dump(config))
        key = way.minibatches
        if key not in self.captures:
            self._capture(folder, way)
        plan = make_plan(self.captures[key].whole, way, self.compared.shard)
        write_plan(plan, folder / PLAN)
        return partial(self._command, folder, self.captures[key])

    def _capture(self, folder: Path, way: Way) -> None:
        """As each rank of pd-train would by itself."""
        config = read_config(folder / CONFIG)
        plain = Way((1,), minibatches=way.minibatches)
        nobody: Any = None
        job = Job(nobody, config, folder, folder / RUN)
        examples = Examples(job, CPU)
        model = load_config_model(config, folder, names=examples.input_names)
        precision = Precision(config.autocast, CPU)
        captured = capture(model, examples.first().inputs, precision=precision)
        plan = make_plan(captured, plain, {})
        job = Job(plan, config, folder, folder / RUN, unchecked=self.unchecked)
        first = RankInfo(0, 1, 0, 1, "", 0)
        self.captures[way.minibatches] = capture_all(job, Examples(job, CPU), first)

    def _command(self, folder: Path, captures: Captures) -> int:
        """pd-train, but that ranks take the capture from here, and that no report is made."""

        def known(_job: Job, examples: Examples, _rank: RankInfo) -> Captures:
            examples.first()  # the others have to be of its kind
            return captures

        save = ("--save-every", str(MICROBATCHES), *(["--unchecked"] if self.unchecked else []))
        words = (folder / PLAN, "--config", folder / CONFIG, "-o", folder / RUN, *save)
        with (
            patch.object(local_model, "capture_all", known),
            patch("pipedream.runtime.report.recording.draw"),
            patch("pipedream.runtime.run_end.write_page"),
        ):
            code: int = cli.main.main(list(map(str, words)), "pd-train")
        return code

    def _autocast(self) -> Any:
        return self.precision if self.precision in AUTOCAST else None

    def _captured_for_pipeline(self) -> Captured:
        if "pipeline" not in self.captured:
            model = make_model(self.compared.make, self.precision)
            batch = collated(self.compared.examples(2), self.precision)
            args, kwargs = ((), batch) if isinstance(batch, dict) else (batch[:1], {})
            precision = Precision(self._autocast(), CPU)
            self.captured["pipeline"] = capture(model, tuple(args), kwargs, precision=precision)
        return self.captured["pipeline"]

    def _loop(self, folder: Path, rank_info: RankInfo, _heartbeats: object) -> int:
        """The user's own loop, on one rank."""
        torch.set_num_threads(1)
        try:
            losses, gradients = self._losses_and_gradients(folder)
        except UserError as error:
            print(f"pd-train: {error.format_message()}", file=sys.stderr, flush=True)
            return USER_ERROR
        torch.save((losses, gradients), folder / f"rank{rank_info.rank}.pt")
        return 0

    def _losses_and_gradients(self, folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
        own_loss = loss_function(self.name) is None
        model = make_model(self.compared.make, self.precision)
        pipeline = Pipeline(
            model,
            read_plan(folder / PLAN),
            "output" if own_loss else loss_function(self.name),
            weigh=_tokens()(model) if own_loss else None,
            microbatches=MICROBATCHES,
            device="cpu",
            autocast=self._autocast(),
            timeout=60.0,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
        minibatches = MINIBATCHES["of 7"]
        examples = self.compared.examples(minibatches.examples)
        losses: list[float] = []
        gradients: dict[str, torch.Tensor] = {}
        for begin, end in minibatches.bounds:
            batch = collated(examples[begin:end], self.precision)
            loss = pipeline(**batch) if own_loss else pipeline(batch[0], target=batch[1])
            loss.backward()
            losses.append(loss.item())
            if begin == 0:
                named = model.named_parameters()
                gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}
            optimizer.step()
            optimizer.zero_grad()
        return losses, gradients


def in_time(work: Callable[[], int], log: Path, seconds: float) -> int | None:
    """The exit code of `work()` in a fork of this process, None if time was up; it prints to `log`.

    The ranks that it starts do not outlive it.
    """
    process = multiprocessing.get_context("fork").Process(target=_work, args=(work, log))
    process.start()
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
        return None
    return process.exitcode


def _work(work: Callable[[], int], log: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    sys.exit(work())


def learnt_by_command(folder: Path) -> Learnt:
    """From the metrics, and from the first checkpoint: in the first update SGD keeps the gradient
    as its momentum.
    """
    run = folder / RUN
    lines = (run / "metrics.jsonl").read_text().splitlines()
    first = min(path for path in (run / "checkpoints").glob("epoch-*") if path.is_dir())
    gradients = {
        name.removesuffix("/momentum_buffer"): tensor
        for file in (first / "optimizer").glob("*.safetensors")
        for name, tensor in load_file(file).items()
        if name.endswith("/momentum_buffer")
    }
    return Learnt([float(json.loads(line)["loss"]) for line in lines], gradients)


def learnt_by_pipeline(folder: Path) -> Learnt:
    """All ranks have the losses, each has the gradients of its stage."""
    saved = [torch.load(path) for path in sorted(folder.glob("rank*.pt"))]
    gradients = {name: tensor for _, own in saved for name, tensor in own.items()}
    return Learnt(saved[0][0], gradients)
