"""The schedule, and how many examples an update has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pipedream.graph.choices import DEFAULT_ORDER, ScheduleName
from pipedream.graph.errors import UserError
from pipedream.optimizer.cli.inputs import any_profile
from pipedream.optimizer.cli.options import Options
from pipedream.optimizer.search.latency import Latency
from pipedream.schedule.policy import uniform_updates


def schedule_of(options: Options, latency: Latency | None) -> ScheduleName:
    return options.schedule or ("weight-stashing" if latency is None else "flush")


def with_schedule(options: Options) -> Options:
    """Returns the options with the schedule that --order is for. Raises UserError."""
    if options.order in (None, DEFAULT_ORDER):
        if options.stages_per_rank not in (None, 1):
            raise UserError(
                f"--stages-per-rank {options.stages_per_rank}: order {DEFAULT_ORDER} has one stage"
                " on each rank: add --order interleaved, zb-v or auto"
            )
        return options
    excluded = {
        f"--schedule {options.schedule}": options.schedule not in (None, "flush"),
        "--objective latency": options.objective == "latency",
        f"--cost-model {options.cost_model}": options.cost_model not in (None, "network"),
    }
    for other in filter(excluded.get, excluded):
        raise UserError(
            f"--order {options.order} is for schedule flush, most minibatches per second, and"
            f" plans that are simulated: leave out {other}"
        )
    return replace(options, schedule="flush")


def in_rounds(options: Options) -> bool:
    """Returns whether an update is per --microbatches. Raises UserError if nothing uses these."""
    in_rounds = options.schedule is not None and uniform_updates(options.schedule)
    unused = not (in_rounds or options.compare or options.objective == "latency")
    if unused and options.microbatches is not None:
        raise UserError(
            "--microbatches needs --objective latency, or --schedule flush, gpipe or 2bw: add one"
            " of these, or leave it out"
        )
    return in_rounds


def with_global_batch(options: Options) -> Options:
    """Returns the options with as many microbatches as --global-batch has of the profile's batch
    size, and with a flush where the user leaves the schedule open: then a step is one of plain
    training with so many examples. Raises UserError if nothing uses it, or it cannot be divided so.
    """
    whole = options.global_batch
    if whole is None:
        return options
    if options.schedule is None and not options.corrections:
        options = replace(options, schedule="flush")
    if options.objective != "latency" and not in_rounds(replace(options, microbatches=None)):
        raise UserError(
            f"--global-batch: {options.schedule or 'weight-stashing'} updates after every"
            " minibatch: add --schedule flush, gpipe or 2bw, or --objective latency"
        )
    if isinstance(options.graph, Path) and options.graph.is_dir():
        return options
    if "microbatches" in options.typed:
        raise UserError(
            "--global-batch and --microbatches both set the examples per update: give one of them"
        )
    profile = any_profile(options)
    if profile is None:
        raise UserError(
            f"--global-batch: without {options.profile_path} the batch size of"
            f" {options.graph_path} is not known: give --microbatches"
        )
    count, rest = divmod(whole, profile.batch_size)
    if rest:
        raise UserError(
            f"--global-batch {whole}: is not a multiple of {profile.batch_size}, the batch size of"
            f" {options.profile_path}: give {_multiples(count, profile.batch_size)}, or profile"
            " another --batch-size"
        )
    return replace(options, microbatches=count)


def latency_of(options: Options) -> Latency | None:
    """Returns the goal of --objective latency, None for throughput. Raises UserError."""
    typed = {"--epsilon": options.epsilon, "--layers": options.layers}
    if options.objective == "throughput":
        for option, value in typed.items():
            if value is not None:
                raise UserError(f"{option} needs --objective latency: add that, or leave it out")
        return None
    if options.microbatches is None:
        raise UserError("--objective latency: add --microbatches B, the number in one batch")
    if options.schedule not in (None, "flush", "gpipe"):
        raise UserError(
            "--objective latency plans for the schedules flush and gpipe: leave out"
            f" --schedule {options.schedule}"
        )
    return Latency(options.microbatches, options.epsilon or 0.0, options.layers)


def _multiples(count: int, size: int) -> str:
    """The multiples of the batch size on both sides."""
    return f"{count * size} or {(count + 1) * size}" if count else str(size)
