"""The end of a run: every rank reports what it measured; rank 0 evaluates and writes the files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pipedream.comm.store_messages import broadcast, receive_message, send_message
from pipedream.graph.measured_run import MEASURED, MeasuredRun, write_measured
from pipedream.graph.plan import Simulated, workers_by_rank
from pipedream.graph.run_config import BasisRotationConfig
from pipedream.runtime.checkpoint import files as checkpoint
from pipedream.runtime.checkpoint.export import export_newest
from pipedream.runtime.held_out import evaluate_alone
from pipedream.runtime.rank_context import RankContext
from pipedream.runtime.report.expectation import busy_shares
from pipedream.runtime.report.page.finished_run import FinishedRun
from pipedream.runtime.report.page.run_page import REPORT, write_page
from pipedream.runtime.report.recording import Recording
from pipedream.runtime.report.stage_seconds import StagesMeasured, measured_stages
from pipedream.runtime.report.summary import write_summary
from pipedream.runtime.report.utilisation import (
    Utilisation,
    measure_utilisation,
    measured_ranks,
    print_utilisation,
)
from pipedream.runtime.run.job import Job
from pipedream.schedule.steady_state import SteadySpan


def finish(context: RankContext) -> None:
    """Called by every rank after the last epoch.

    Once rank 0 has saved, no rank waits for it: evaluation may take longer than the timeout.
    """
    local, rank_info = context.local, context.local.rank_info
    context.say("at the end of the run")
    broadcast(context.store, rank_info, "saved", True)  # its last save may take long
    context.clock.read()
    send_message(
        context.store, f"report/{rank_info.rank}", [_reports(context), context.recorder.sent()]
    )
    if rank_info.rank == 0:
        messages = [
            receive_message(context.store, f"report/{r}") for r in range(rank_info.world_size)
        ]
        reports = [report for of_rank, _ in messages for report in of_rank]
        recording = Recording.of([sent for _, sent in messages])
        if recording.epochs or not local.job.has_summary:  # else an export alone was missing
            _sum_up(context, recording, reports)
        if local.job.export is not None:
            export_newest(local.job)


def _sum_up(context: RankContext, recording: Recording, reports: list[dict[str, Any]]) -> None:
    """Writes what rank 0 knows of the run; its last epochs may have been trained before."""
    job = context.local.job
    spent = measure_utilisation(list(recording.epochs.values()), _steady(context))
    for report in reports:
        report["busy"] = round(spent.busy(report["rank"]), 4) if recording.epochs else None
    also, measured, stages = "", None, None
    if recording.epochs:
        stages = _stages(context, recording)
        _write_recording(job, recording, spent, reports)
        measured = _write_measured(context, recording, spent, reports)
        also = "timeline.png, " + f"{MEASURED}, " * (measured is not None)
    summary = _summary(context, reports, spent) | _try_model(context)
    # Before summary.json, which says that the run is finished.
    run = FinishedRun(job, summary, spent, measured, stages)
    if write_page(run):
        also = f"{REPORT}, {also}"
    write_summary(run, also + "trace.json, " * job.trace + "tensorboard, " * job.tensorboard)
    context.writers.end(summary)


def _reports(context: RankContext) -> list[dict[str, Any]]:
    """Returns a report for each stage of this rank; memory and clock are those of the rank."""
    stepping = context.stepping
    return [
        {
            "rank": context.local.rank_info.rank,
            "stage": stage.stage,
            "replica": stage.replica,
            "peak_memory_bytes": context.memory.bytes,
            "predicted_memory_bytes": _predicted_memory(context),
            "process_memory_bytes": context.memory.process,
            "predicted_process_bytes": _predicted_process(context),
            "reserved_memory_bytes": context.memory.reserved,
            "rest_of_gpu_bytes": context.memory.rest,
            "weight_versions": context.weights[stage.stage].peak_versions,
            "in_flight": context.peak_in_flight[stage.stage],
            "updates_left_out": stepping.stages[stage.stage].skipped,
            "clock_error_seconds": context.clock.error,
        }
        for stage in context.local.stages
    ]


def _predicted_memory(context: RankContext) -> float | None:
    """Returns the bytes that the plan predicts for this rank; None if it was trained otherwise."""
    job = context.local.job
    wanted = job.config.asynchronous
    counted = frozenset(job.plan.corrections or ()) == wanted.with_memory
    if wanted.basis_rotation is not None:  # profiles say what bases of such a width take
        counted &= wanted.basis_rotation.widest == BasisRotationConfig().widest
    planned = [job.plan.stages[stage.stage].memory for stage in context.local.stages]
    known = [memory.total for memory in planned if memory is not None]
    return sum(known) if job.as_planned and counted and len(known) == len(planned) else None


def _predicted_process(context: RankContext) -> float | None:
    """Returns the bytes that the plan predicts for the whole process; None if it does not say."""
    memory, beside = _predicted_memory(context), context.local.job.plan.predicted.process_bytes
    return None if memory is None or beside is None else memory + beside


def _simulated(job: Job) -> Simulated | None:
    """Returns the simulation of the plan; None if it was trained under another schedule."""
    return job.plan.predicted.simulated if job.as_planned else None


def _steady(context: RankContext) -> SteadySpan | None:
    """Returns the minibatches of an epoch that find the pipeline full, if there are any."""
    minibatches = context.local.examples.minibatches
    known = context.recorder.first(minibatches)
    return SteadySpan.within(context.local.job.policy, minibatches, known)


def _write_recording(
    job: Job, recording: Recording, spent: Utilisation, reports: list[dict[str, Any]]
) -> None:
    recording.write_last(job.run)
    if job.trace:
        recording.write_all(job.run / "trace.json")
        error = max(report["clock_error_seconds"] for report in reports)
        predicted = busy_shares(job.plan) if job.as_planned else {}
        workers = workers_by_rank(job.plan.rank_assignment)
        print_utilisation(spent, workers, predicted, _simulated(job), error)


def _write_measured(
    context: RankContext,
    recording: Recording,
    spent: Utilisation,
    reports: Sequence[Mapping[str, Any]],
) -> MeasuredRun | None:
    """Writes measured.json, unless an epoch is one small minibatch. Returns what it wrote."""
    job, sizes = context.local.job, context.local.examples.sizes
    whole = len(sizes) - bool(sizes.rest)
    span = _steady(context) or SteadySpan(whole, 0, whole)
    epochs = list(recording.epochs.values())
    ranks = measured_ranks(epochs, range(span.first, min(span.last, whole)), job.plan)
    if not ranks:
        return None
    peaks = {
        report["rank"]: float(report["peak_memory_bytes"])
        for report in reports
        if report["predicted_memory_bytes"] is not None
    }
    ranks = tuple(
        rank.model_copy(update={"peak_memory_bytes": peaks.get(rank.rank)}) for rank in ranks
    )
    measured = MeasuredRun(
        device=job.device,
        threads=torch.get_num_threads(),
        batch_size=job.config.batch_size,
        schedule=job.schedule,
        seconds_per_minibatch=spent.seconds_per_minibatch,
        ranks=ranks,
        plan=job.plan,
    )
    write_measured(measured, job.run / MEASURED)
    return measured


def _stages(context: RankContext, recording: Recording) -> StagesMeasured | None:
    """Returns what the stages did in the steady state of the last epoch."""
    span = _steady(context)
    if span is None:
        return None
    last = recording.epochs[max(recording.epochs)]
    return measured_stages(last, span, context.local.job.plan)


def _summary(
    context: RankContext, reports: list[dict[str, Any]], spent: Utilisation
) -> dict[str, Any]:
    local, job, display = context.local, context.local.job, context.display
    assert display is not None
    seconds = spent.seconds_per_minibatch
    simulated = _simulated(job)
    return {
        "schedule": job.schedule,
        "epochs": job.epochs,
        "minibatches_per_epoch": local.examples.minibatches,
        "seconds_per_minibatch": seconds,
        "predicted_seconds_per_minibatch": job.plan.predicted.seconds_per_minibatch,
        "expected_seconds_per_minibatch": job.plan.predicted.expected_seconds_per_minibatch,
        "expected_interval": job.plan.predicted.expected_interval if job.is_comparable else None,
        "simulated_seconds_per_minibatch": simulated and simulated.seconds_per_minibatch,
        "bubble": round(spent.bubble, 4) if spent.seconds else None,
        "simulated_bubble": simulated and simulated.bubble,
        "samples_per_second": job.config.batch_size / seconds if seconds else 0.0,
        "final_loss": display.last_loss,
        "ranks": reports,
    }


def _try_model(context: RankContext) -> dict[str, Any]:
    """Returns the held-out metrics: the last ones, or evaluated now on this worker."""
    local, job = context.local, context.local.job
    if local.evaluation is not None:
        return dict(context.metrics)
    if not job.evaluate or local.examples.held_out is None:
        return {}
    path = checkpoint.latest(job.checkpoints)
    assert path is not None
    return evaluate_alone(context, path)
