"""`pd-train`: trains a plan. Under torchrun or mpirun it is one rank; alone it starts all ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipedream.comm.launcher import environment, restarts
from pipedream.graph.choices import SCHEDULES
from pipedream.graph.command import Command, FiniteRange
from pipedream.graph.errors import UserError

if TYPE_CHECKING:
    from pipedream.comm.launcher import Place
    from pipedream.runtime.job import Job


@click.command(
    "pd-train",
    cls=Command,
    examples=[
        "pd-train plan/plan.json --config run.yaml --epochs 10",
        "torchrun --no-python --nproc-per-node 4 pd-train plan/plan.json --config run.yaml",
    ],
    groups={
        "What to train": ["config", "schedule", "epochs"],
        "Where it runs": ["workers", "device", "timeout", "replan"],
        "Checkpoints and restarts": [
            "output",
            "resume",
            "save_every",
            "keep",
            "export",
            "max_restarts",
        ],
        "What is reported": ["evaluate", "trace", "tensorboard"],
    },
)
@click.argument("plan", type=click.Path(path_type=Path))
@click.option(
    "--config",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The run config (YAML): model, data, loss and optimizer.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for checkpoints, metrics and pictures.  [default: runs/NAME OF CONFIG]",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Processes to start on this machine.  [default: as many as the plan has workers]",
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Where each worker computes.",
)
@click.option(
    "--schedule",
    type=click.Choice(SCHEDULES),
    help="When weights are updated, and which version a minibatch uses.  [default: the plan's]",
)
@click.option(
    "--epochs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Passes over the training data, those of earlier runs included.  [default: the config's]",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Continue from the newest checkpoint in the output folder; the plan may be another one.  "
    "[default: start afresh]",
)
@click.option(
    "--save-every",
    type=click.IntRange(min=1),
    metavar="N",
    help="Also save a checkpoint every N minibatches, rounded up to whole updates of all stages. "
    "The pipeline drains at each.  [default: at the end of each epoch only]",
)
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    metavar="K",
    help="Keep only the newest K checkpoints.  [default: all]",
)
@click.option(
    "--export",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the trained model to one safetensors FILE for the plain model's load_state_dict. "
    "With --resume on a finished run, only that is done.  [default: checkpoints only]",
)
@click.option(
    "--timeout",
    type=FiniteRange(min=1, max=1e6),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="How long a worker may be silent before it counts as lost.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="How often to start all workers again, from the newest checkpoint, when one is lost. "
    "Under torchrun, give this option to torchrun.",
)
@click.option(
    "--replan",
    is_flag=True,
    help="If there are fewer workers than the plan has, run pd-optimize for those (on graph.txt "
    "beside PLAN) and train that plan: with --workers, when fewer processes are started, or when a "
    "worker is lost and no restarts are left.  [default: refuse]",
)
@click.option(
    "--evaluate/--no-evaluate",
    default=True,
    show_default=True,
    help="Try the trained model on the held-out data, if the data source gives any.",
)
@click.option(
    "--trace",
    is_flag=True,
    help="Record every action of every epoch in trace.json (for ui.perfetto.dev), and print how "
    "each rank spent its time beside what the plan predicts.  [default: the last epoch only]",
)
@click.option(
    "--tensorboard",
    is_flag=True,
    help="Log loss, samples per second, learning rate, and each rank's busy share and bytes of "
    "memory to the folder tensorboard of the output.  [default: off]",
)
def main(
    plan: Path,
    config: Path,
    output: Path | None,
    replan: bool,
    workers: int | None,
    max_restarts: int,
    **options: Any,
) -> int:
    """Train the model of a run config as the pipeline that PLAN (a plan.json) describes.

    Starts one process per worker of the plan on this machine. Under torchrun, mpirun or srun, each
    process that the launcher starts is one worker.
    """
    # Else torch adds C++ traces of its own to the line that says which worker was lost.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

    from pipedream.runtime.supervise import launch

    try:
        job = _job(plan, config, output, replan, options)
        place = environment()
        return _start(job, workers, max_restarts) if place is None else _work(job, place)
    except (UserError, OSError):
        if launch.reports_the_error():
            raise
        return launch.USER_ERROR


def _job(
    plan: Path, config: Path, output: Path | None, replan: bool, options: dict[str, Any]
) -> Job:
    """The run that is asked for; `options` are fields of Job. Raises UserError if it cannot be."""
    from pipedream.graph.plan import moved, read_plan
    from pipedream.graph.run_config import read_config
    from pipedream.runtime.job import Job

    read, run_config = read_plan(plan), read_config(config)
    run = output or Path("runs") / config.stem
    options["schedule"] = options["schedule"] or read.schedule
    options["epochs"] = options["epochs"] or run_config.epochs
    job = Job(
        plan=moved(read, plan.parent, run),
        config=run_config,
        directory=config.resolve().parent,
        run=run,
        restarted=restarts() > 0,
        replan=plan if replan else None,
        **options,
    )
    job.check()
    return job


def _start(job: Job, workers: int | None, max_restarts: int) -> int:
    """Starts the workers, if there is anything left to train. Returns the exit code."""
    from pipedream.runtime.engine.training_segment import Position
    from pipedream.runtime.supervise import launch

    planned, replan = job.plan.workers, job.replan is not None
    if workers is not None and (workers > planned or (workers < planned and not replan)):
        raise UserError(
            f"--workers {workers}: the plan is for {planned} workers; make another with "
            "pd-optimize, or for fewer with --replan"
        )
    saved = job.saved if job.resume else None
    if job.export is not None and saved is not None and saved >= Position(job.epochs):
        from pipedream.runtime.checkpoint.plain_model import export_newest

        export_newest(job, job.export)
        return 0
    return launch.spawn(sys.argv, workers or planned, job.timeout, max_restarts, replan)


def _work(job: Job, place: Place) -> int:
    """Runs this process's part of the run. Returns its exit code."""
    from pipedream.runtime.supervise import launch

    # Before the imports, which take seconds.
    launch.die_with_parent()
    heartbeats = launch.start_heartbeat(place.rank)

    from pipedream.comm.transport import PeerLost
    from pipedream.runtime.data.reader import DataLost
    from pipedream.runtime.trainer import Stopped, train

    try:
        train(job, place, heartbeats)
    except Stopped as stopped:
        if place.rank == 0:
            print(f"pd-train: {stopped}", file=sys.stderr, flush=True)
        return launch.STOPPED if heartbeats is not None else launch.code_of_stopped()
    except PeerLost as error:
        if heartbeats is not None and error.peer is not None:
            heartbeats.report_lost(place.rank, error.peer)
        if heartbeats is None:
            print(f"pd-train: rank {place.rank}: {error}", file=sys.stderr, flush=True)
            launch.let_the_cause_show()
        # Not sys.exit: what is left of the process group would wait for the lost peer.
        os._exit(launch.PEER_LOST)
    except DataLost as error:
        if heartbeats is None:
            message = f"pd-train: rank {place.rank}: data_workers: {error}"
            print(message, file=sys.stderr, flush=True)
        else:
            heartbeats.report(place.rank, f"{heartbeats.of(place.rank).words} ({error})")
        os._exit(launch.DATA_LOST)
    return 0


if __name__ == "__main__":
    main()
