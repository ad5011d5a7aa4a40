"""`pd-train`: trains a plan. Under torchrun or mpirun it is one rank; alone it starts all ranks."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from pipedream.comm.rank_info import environment, let_rank_0_speak, restarts, without_srun
from pipedream.graph.choices import SCHEDULES
from pipedream.graph.command import (
    COUNT,
    PATH,
    Command,
    FiniteRange,
    UserError,
    in_one_line,
    option,
)

if TYPE_CHECKING:
    from pipedream.comm.rank_info import RankInfo
    from pipedream.graph.run_config import RunConfig
    from pipedream.runtime.run.job import Job
    from pipedream.runtime.supervise.heartbeat import Heartbeats


_GROUPS = {
    "What to train": (
        option(
            "--config FILE",
            "The run config (YAML): model, data, loss and optimizer.",
            PATH,
            required=True,
        ),
        option(
            "--schedule",
            "When weights are updated, and which version a minibatch uses.  [default: the plan's]",
            click.Choice(SCHEDULES),
        ),
        option(
            "--epochs N",
            "Passes over the training data, those of earlier runs included.  [default: the"
            " config's]",
            COUNT,
        ),
    ),
    "Where it runs": (
        option(
            "--workers N",
            "Processes to start on this machine.  [default: as many as the plan has workers]",
            COUNT,
        ),
        option(
            "--device", "Where each worker computes.", click.Choice(["cpu", "cuda"]), default="cpu"
        ),
        option(
            "--compile WAY",
            "What torch.compile gets: none, stage, groups (blocks of the model, equal ones once),"
            " auto for what pd-profile has found fastest, or the name of a backend.  [default: the"
            " config's compile, else none]",
        ),
        option(
            "--dry-run",
            "Check plan, run config, data, model, loss and memory in this process, in seconds;"
            " train and write nothing.",
        ),
        option(
            "--unchecked",
            "Do not compare the first passes of the pipeline with those of the model itself before"
            " training: saves a few passes of the whole model.  [default: compare]",
        ),
        option(
            "--timeout SECONDS",
            "How long a worker may be silent before it counts as lost.",
            FiniteRange(min=1, max=1e6),
            default=300.0,
        ),
        option(
            "--replan",
            "If there are fewer workers than the plan has, run pd-optimize for those (on graph.txt"
            " beside PLAN) and train that plan: with --workers, when fewer processes are started,"
            " or when a worker is lost and no restarts are left.  [default: refuse]",
        ),
        option(
            "--retune",
            "After the first hundred minibatches run pd-optimize with what they took (on graph.txt"
            " beside PLAN), and go on under a better plan from the next checkpoint. Alone, or by a"
            " torchrun with --max-restarts.  [default: keep the plan]",
        ),
    ),
    "Checkpoints and restarts": (
        option(
            "-o --output",
            "Folder for checkpoints, metrics, pictures and report.html, the run on one page."
            "  [default: runs/NAME OF CONFIG]",
            click.Path(path_type=Path, file_okay=False),
        ),
        option(
            "--resume",
            "Continue from the newest checkpoint in the output folder; the plan may be another"
            " one.  [default: start afresh]",
        ),
        option(
            "--save-every N",
            "Also save a checkpoint every N minibatches, rounded up to whole updates of all"
            " stages. The pipeline drains at each.  [default: at the end of each epoch only]",
            COUNT,
        ),
        option("--keep K", "Keep only the newest K checkpoints.  [default: all]", COUNT),
        option(
            "--init FOLDER",
            "Begin with the weights in a FOLDER of torch.distributed.checkpoint, and with the"
            " optimizer's state if it has that.  [default: the model as its factory makes it]",
            click.Path(path_type=Path, file_okay=False, exists=True),
        ),
        option(
            "--init-optimizer/--no-init-optimizer",
            "Whether --init takes the optimizer's state too.",
            default=True,
        ),
        option(
            "--export PATH",
            "Write the trained model: NAME.safetensors is one file for the plain model's"
            " load_state_dict, NAME.dcp a folder of torch.distributed.checkpoint that has the"
            " optimizer's state, too; with any other name a model of transformers becomes a folder"
            " for from_pretrained, and others one file. With --resume on a finished run, only that"
            " is done.  [default: checkpoints only]",
            click.Path(path_type=Path),
        ),
        option(
            "--max-restarts N",
            "How often to start all workers again, from the newest checkpoint, when one is lost."
            " Under torchrun, give this option to torchrun.",
            click.IntRange(min=0),
            default=0,
        ),
    ),
    "What is reported": (
        option(
            "--evaluate/--no-evaluate",
            "Try the trained model on the held-out data, if the data source gives any.",
            default=True,
        ),
        option(
            "--evaluate-only",
            "Train nothing: evaluate the newest checkpoint in the output folder on the held-out"
            " data, print loss, accuracy and the metrics of the run config, and write them to"
            " evaluation.json there.",
        ),
        option(
            "--checkpoint FOLDER",
            "With --evaluate-only: a checkpoint of this or another run of the model."
            "  [default: the newest]",
            click.Path(path_type=Path, file_okay=False, exists=True),
        ),
        option(
            "--trace",
            "Record every action of every epoch in trace.json (for ui.perfetto.dev), and print how"
            " each rank spent its time beside what the plan predicts.  [default: the last epoch"
            " only]",
        ),
        option(
            "--tensorboard",
            "Log loss, samples per second, learning rate, and each rank's busy share and bytes of"
            " memory to the folder tensorboard of the output, as `metrics: tensorboard` in the run"
            " config does.  [default: off]",
        ),
    ),
}
_EXAMPLES = [
    "pd-train plan/plan.json --config run.yaml --epochs 10",
    "torchrun --no-python --nproc-per-node 4 pd-train plan/plan.json --config run.yaml",
]


@click.command("pd-train", cls=Command, groups=_GROUPS, examples=_EXAMPLES)
@click.argument("plan", type=PATH)
def main(
    plan: Path,
    config: Path,
    output: Path | None,
    replan: bool,
    retune: bool,
    workers: int | None,
    max_restarts: int,
    dry_run: bool,
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
        rank_info = environment()
        if dry_run:
            first = rank_info is None or rank_info.rank == 0
            return _try(plan, config, options) if first else 0
        job = _job(plan, config, output, replan, {**options, "retune": plan if retune else None})
        if retune:
            _check_launcher(rank_info)
        return _start(job, workers, max_restarts) if rank_info is None else _work(job, rank_info)
    except Exception as error:
        line = in_one_line(error)
        if line is not None:
            let_rank_0_speak()
        launch.record_error(line or error)
        raise


def _check_launcher(rank_info: RankInfo | None) -> None:
    from pipedream.runtime.supervise.retune import check_launcher

    check_launcher(rank_info)


def _try(plan: Path, config: Path, options: dict[str, Any]) -> int:
    """Checks the run without beginning it; its folder goes. Raises UserError if it cannot be."""
    from pipedream.runtime.dry_run import dry_run

    others = ("resume", "export", "evaluate_only")
    _refuse(others, options, "--dry-run checks a run from its beginning")
    with TemporaryDirectory() as folder:
        for line in dry_run(_job(plan, config, Path(folder), False, options)):
            print(line, flush=True)
    print("Nothing was trained or written.")
    return 0


def _job(
    plan: Path, config: Path, output: Path | None, replan: bool, options: dict[str, Any]
) -> Job:
    """Returns the run that is asked for; `options` are fields of Job. Raises UserError."""
    from pipedream.graph.plan import moved, read_plan
    from pipedream.graph.run_config import read_config
    from pipedream.runtime.run.job import Job

    read, run_config = read_plan(plan), read_config(config)
    run = output or Path("runs") / config.stem
    if (way := options.pop("compile")) is not None:
        run_config = run_config.model_copy(update={"compile": way})
    if options["evaluate_only"]:
        run_config = _to_evaluate(run_config, {**options, "replan": replan})
    options["schedule"] = options["schedule"] or read.schedule
    options["epochs"] = options["epochs"] or run_config.epochs
    job = Job(
        plan=moved(read, plan.parent, run),
        config=run_config,
        directory=config.resolve().parent,
        run=run,
        restarted=restarts() > 0,
        replan=plan if replan else None,
        plan_folder=plan.parent,
        **options,
    )
    job.check()
    return job


def _to_evaluate(config: RunConfig, options: dict[str, Any]) -> RunConfig:
    """Returns the config to evaluate with alone. Raises UserError if training is asked for, too."""
    kept = ("resume", "export", "init", "save_every", "keep", "replan", "retune")
    others = (*kept, "trace", "tensorboard")
    _refuse(others, options, "--evaluate-only trains nothing")
    if not options["evaluate"]:
        raise UserError("--evaluate-only: leave --no-evaluate out")
    every = None if config.data.varying else 1
    return config.model_copy(update={"evaluate_every": every})


def _refuse(others: Iterable[str], options: dict[str, Any], reason: str) -> None:
    """Raises UserError for the first of these options that is given."""
    for name in others:
        if options[name]:
            raise UserError(f"{reason}: leave --{name.replace('_', '-')} out")


def _start(job: Job, workers: int | None, max_restarts: int) -> int:
    """Starts the workers, if there is anything left to train. Returns the exit code."""
    from pipedream.runtime.run.training_segment import Position
    from pipedream.runtime.supervise import launch

    planned, replan = job.plan.workers, job.replan is not None
    warning = without_srun()
    if warning is not None:
        print(f"pd-train: {warning}", file=sys.stderr)
    if job.device == "cpu" and any(stage.offload for stage in job.plan.stages):
        print(
            "pd-train: the plan moves activations to the memory of the host, where they are on"
            " --device cpu: that takes time and saves nothing",
            file=sys.stderr,
        )
    if sys.stderr.isatty():
        print(f"pd-train: {workers or planned} workers load and capture the model", file=sys.stderr)
    if workers is not None and (workers > planned or (workers < planned and not replan)):
        raise UserError(
            f"--workers {workers}: the plan is for {planned} workers; make another with "
            "pd-optimize, or for fewer with --replan"
        )
    saved = job.saved if job.resume else None
    trained = saved is not None and saved >= Position(job.epochs)
    if job.export is not None and trained and job.has_summary:
        from pipedream.runtime.checkpoint.export import export_newest

        export_newest(job)
        return 0
    _import_for(workers or planned)
    work = partial(_work_forked, job)
    return launch.spawn(work, workers or planned, job.timeout, max_restarts, replan)


def _import_for(workers: int) -> None:
    """Imports here what all workers need: they are forked off this process, then and at restarts.

    Libraries of mathematics read OMP_NUM_THREADS now. Nothing here may begin to use a GPU.
    """
    from pipedream.runtime.supervise import launch

    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asks the driver without using it
    was_set = "OMP_NUM_THREADS" in os.environ
    os.environ.setdefault("OMP_NUM_THREADS", str(launch.threads_each(workers)))
    import_module("pipedream.runtime.trainer")
    if not was_set:
        del os.environ["OMP_NUM_THREADS"]
    gc.collect()
    gc.freeze()  # else each fork's first collection looks through all of it, and copies its pages


def _work_forked(job: Job, rank_info: RankInfo, heartbeats: Heartbeats) -> int:
    """Runs the part of a worker that was forked off. Returns its exit code."""
    import numpy as np
    import torch

    from pipedream.runtime.supervise import launch

    np.random.seed()  # else all workers would draw the same; Python's own sees to it by itself
    # Also makes torch's threads anew: 2.15 aborts now and then if two threads of a fork do.
    threads = os.environ["OMP_NUM_THREADS"]
    torch.set_num_threads(int(threads) if threads.isdigit() else torch.get_num_threads())
    try:
        return _work(replace(job, restarted=restarts() > 0), rank_info, heartbeats)
    except BrokenPipeError:  # who reads the output has had enough
        return 128 + signal.SIGPIPE
    except Exception as error:
        line = in_one_line(error)
        launch.record_error(line or error, heartbeats)
        if line is None:
            raise
        return launch.USER_ERROR


def _work(job: Job, rank_info: RankInfo, heartbeats: Heartbeats | None = None) -> int:
    """Runs this process's part of the run. Returns its exit code."""
    from pipedream.comm.messages import PeerLost
    from pipedream.runtime.data.reader import DataLost
    from pipedream.runtime.supervise import launch
    from pipedream.runtime.trainer import Retuned, Stopped, train

    try:
        train(job, rank_info, heartbeats)
    except Retuned:
        return launch.RETUNED
    except Stopped as stopped:
        if rank_info.rank == 0:
            print(f"pd-train: {stopped}", file=sys.stderr, flush=True)
        return launch.STOPPED if heartbeats is not None else launch.code_of_stopped()
    except PeerLost as error:
        if heartbeats is not None and error.peer is not None:
            heartbeats.report_lost(rank_info.rank, error.peer)
        if heartbeats is None:
            print(f"pd-train: rank {rank_info.rank}: {error}", file=sys.stderr, flush=True)
            launch.let_the_cause_show()
            launch.record_error(str(error))
        # Not sys.exit: what is left of the process group would wait for the lost peer.
        os._exit(launch.PEER_LOST)
    except DataLost as error:
        if heartbeats is None:
            message = f"pd-train: rank {rank_info.rank}: data_workers: {error}"
            print(message, file=sys.stderr, flush=True)
        launch.record_error(str(error), heartbeats)
        os._exit(launch.DATA_LOST)
    return 0


if __name__ == "__main__":
    main()
