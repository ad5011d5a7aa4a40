"""`pd-train --dry-run`: what a run does before its ranks meet, in this process alone.

The run config, the data, the model and its stages under the plan, the optimizer and the loss of one
minibatch: whatever would stop the run is found in seconds, and nothing is left behind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from pipedream.capture.compute_settings import Precision
from pipedream.capture.errors.capture_errors import blaming_modules
from pipedream.capture.loss import load_loss, load_metrics
from pipedream.capture.sources.load import load_config_model
from pipedream.comm.device.memory import free_memory
from pipedream.comm.rank_info import LOCALHOST, RankInfo
from pipedream.comm.rendezvous import choose_device
from pipedream.graph.choices import DEFAULT_ORDER
from pipedream.graph.errors import UserError
from pipedream.graph.plan import workers_by_rank
from pipedream.graph.units import show_bytes, show_seconds
from pipedream.runtime.data.examples import Examples
from pipedream.runtime.local.captures import capture_all
from pipedream.runtime.local.local_model import check_stages
from pipedream.runtime.local.local_stage import LocalStage
from pipedream.runtime.local.resume import begin
from pipedream.runtime.report.metrics.writers import Writers
from pipedream.runtime.run.announcement import announced
from pipedream.runtime.run.job import Job
from pipedream.runtime.stages.partition import interfaces, links, tied
from pipedream.runtime.stages.randomness import MinibatchRng


def dry_run(job: Job) -> Iterator[str]:
    """Yields lines for the user. `job.run` is a folder that goes. Raises UserError."""
    workers = job.plan.workers
    first = RankInfo(0, workers, 0, workers, LOCALHOST, 0)
    choose_device(job.device, first)
    device = torch.device("cpu")
    yield f"plan      {_plan(job)}"
    examples = Examples(job, device)
    yield f"data      {_data(job, examples)}"
    yield f"loss      {job.config.loss}: {_loss(job, examples):.4f} for the first minibatch"
    captures = capture_all(job, examples, first)
    of_stages = interfaces(captures.whole, job.plan)
    held = tied(captures.whole, of_stages)
    check_stages(job, job.spec(links(of_stages), held), held, examples.minibatches)
    rng = MinibatchRng(job.config.seed, device)
    stages = [LocalStage(job, (own.stage, 0), captures, own, rng, {}) for own in of_stages]
    sizes = (sum(p.nbytes for p in stage.parameters.values()) for stage in stages)
    amounts = ", ".join(map(show_bytes, sizes))
    yield f"model     {job.config.model.source} as it was planned; parameters by stage {amounts}"
    if job.init is not None:
        yield f"init      {begin(job.init, stages, job.init_optimizer)}"
    for title, line in announced(job, examples.minibatches, captures.learners_of(job)):
        yield f"{title:9} {line}"
    Writers.of(job)
    yield f"memory    {_memory(job)}"
    wanted = job.plan.predicted.expected_seconds_per_minibatch
    if job.as_planned and wanted is not None:
        epoch = show_seconds(wanted * examples.minibatches)
        yield f"time      expected {show_seconds(wanted)} per minibatch, {epoch} per epoch"


def _plan(job: Job) -> str:
    plan, replicas = job.plan, ", ".join(map(str, job.plan.replicas))
    text = f"stages of {replicas} workers; {plan.workers} in all"
    if job.order == DEFAULT_ORDER:
        return text
    counts = sorted({len(own) for own in workers_by_rank(plan.rank_assignment).values()})
    several = f", each in {' or '.join(map(str, counts))} stages" * (counts != [1])
    return f"{text}{several}; order {job.order}"


def _data(job: Job, examples: Examples) -> str:
    sizes, source = examples.sizes, job.config.data.source
    epoch = f"{examples.minibatches} minibatches of {sizes.batch_size} an epoch"
    held_out = 0 if examples.held_out is None else len(examples.held_out)
    return f"{source}: {sizes.examples} examples, {epoch}" + f"; {held_out} held out" * bool(
        held_out
    )


def _loss(job: Job, examples: Examples) -> float:
    """Returns the first minibatch's, by the plain model. Raises UserError if it is not finite."""
    config = job.config
    model = load_config_model(config, job.directory, names=examples.input_names)
    batch = examples.first()
    with Precision(config.autocast, examples.device).computing():
        with blaming_modules(config.model.source, model):
            output = model(*batch.inputs)
        value = load_loss(config.loss, job.directory)(output, batch.target).item()
    for metric in load_metrics(config.held_out_metrics, job.directory).values():
        metric(output, batch.target)
    if not math.isfinite(value) and config.nan == "stop":
        raise UserError(f"the loss of the first minibatch is {value}: look for nan in the data")
    return value


def _memory(job: Job) -> str:
    """Returns what the plan says that ranks need, beside what there is."""
    ranks = workers_by_rank(job.plan.rank_assignment).values()
    needs = [sum(job.plan.stages[stage].memory_bytes for stage, _ in own) for own in ranks]
    if not (job.as_planned and job.has_planned_batch):
        return "not known: the plan is for another schedule or batch size"
    planned = ", ".join(show_bytes(stage.memory_bytes) for stage in job.plan.stages)
    text = f"the plan needs {planned} of a worker, by stage"
    if any(len(own) > 1 for own in ranks):
        text += f"; of a rank, for all its stages, at most {show_bytes(max(needs))}"
    if job.device == "cuda":
        there = free_memory(torch.device("cuda", 0))
        return f"{text}; a GPU has {show_bytes(there)} free" + _too_much(max(needs), there)
    needed = sum(needs)
    there = free_memory(torch.device("cpu"))
    if math.isinf(there):
        return text
    more = f"; all of them {show_bytes(needed)}, and this machine has {show_bytes(there)} free"
    return text + more + _too_much(needed, there)


def _too_much(needed: float, there: float) -> str:
    return "" if needed <= there else ": TOO LITTLE"
