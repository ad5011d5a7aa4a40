"""Planning again from what a run has measured (`--retune`), and going on under the better plan.

From what the first minibatches took, rank 0 has pd-optimize plan again, beside the run, and notes a
better plan in the run's folder (`RETUNED`). At the next checkpoint all ranks stop. The launcher
starts them again, and they go on from there under the plan that is noted, as with `--resume` under
another plan.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import Field
from torch._C._distributed_c10d import Store

from pipedream.comm.rank_info import RESTARTS, RankInfo
from pipedream.comm.store_messages import broadcast
from pipedream.graph.command import write_whole
from pipedream.graph.errors import ArtifactModel, UserError, read_artifact
from pipedream.graph.measured_run import MEASURED, MeasuredRun, read_measured, write_measured
from pipedream.graph.plan import Amount, Plan, moved, read_plan
from pipedream.graph.units import show_seconds
from pipedream.runtime.run.job import Job
from pipedream.runtime.supervise.replan import plan_in_words, run_pd_optimize

RETUNED = "retuned.json"
"""File name in the folder of the run: the plan that it goes on under when it is started again."""

_RUN_TO_RUN = 0.02
"""By so much do two runs of one plan differ; a plan has to gain more."""


class Retuned(ArtifactModel):
    """The last plan that a run has changed to."""

    number: int = Field(ge=1)
    """It is in the folder `retune-NUMBER` of the run's."""
    before: Amount
    """Measured seconds per minibatch under the plan before it."""
    returned: bool = False
    """Whether the run has gone back to that one, as it was faster."""


def _folder(job: Job, number: int) -> Path:
    return job.run / f"retune-{number}"


def check_launcher(rank_info: RankInfo | None) -> None:
    """Raises UserError if the launcher does not start the ranks again; None: pd-train's own does.

    torchrun does it as often as its own --max-restarts says.
    """
    if rank_info is None:
        return
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        raise UserError(
            "--retune: mpirun and srun do not start the workers again: start pd-train alone or by"
            " torchrun, or leave it out"
        )
    if not _restarts_left():
        raise UserError(
            "--retune: the workers are started again to go on under another plan: give torchrun"
            " --max-restarts 3"
        )


def _restarts_left() -> int:
    """Returns how often torchrun starts the ranks again yet; 1 without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return 1
    most, had = (os.environ.get(n, "0") or "0" for n in ("TORCHELASTIC_MAX_RESTARTS", RESTARTS))
    return int(most) - int(had)


def retuned(job: Job, rank_info: RankInfo, store: Store) -> tuple[Job, RankInfo]:
    """Returns the job under the plan that the run has changed to, and this rank's number in it;
    both as they are if it has not. The plan uses the first ranks. All ranks raise UserError if it
    cannot be read.
    """
    found = _changed_to(job) if rank_info.rank == 0 else None
    answer = broadcast(store, rank_info, "retuned", found)
    if "error" in answer:
        raise UserError(answer["error"])
    if "plan" not in answer:
        return job, rank_info
    plan = Plan.model_validate_json(answer["plan"])
    here = min(rank_info.local_world_size, plan.workers)
    changed = under(job, plan, _folder(job, answer["number"]))
    return changed, replace(rank_info, world_size=plan.workers, local_world_size=here)


def _changed_to(job: Job) -> dict[str, str | int]:
    try:
        last = _last(job)
        if last is None:
            return {}
        folder = _folder(job, last.number)
        made = read_measured(folder / MEASURED).plan if last.returned else None
        plan = moved(made or read_plan(folder / "plan.json"), folder, job.run)
        return {"plan": plan.model_dump_json(), "number": last.number}
    except UserError as error:
        return {"error": error.format_message()}


def _last(job: Job) -> Retuned | None:
    path = job.run / RETUNED
    return read_artifact(path, Retuned) if path.exists() else None


def under(job: Job, plan: Plan, folder: Path) -> Job:
    """Returns the job under another plan, from the folder, as one that is resumed: the passes of a
    new plan are checked. Raises UserError if it cannot be.
    """
    goes_on = job.resume or job.saved is not None
    changed = replace(job, plan=plan, plan_folder=folder, restarted=False, resume=goes_on)
    changed.check_order()
    changed.check_recordings()
    changed.check_microbatches()
    return changed


def forget_earlier(job: Job) -> None:
    """Called when a run is started by its user: under the plan that is given."""
    (job.run / RETUNED).unlink(missing_ok=True)


@dataclass
class Retuner:
    """Rank 0's part; `say` prints a line."""

    job: Job
    say: Callable[[str], None]
    found: Retuned | None = None
    process: subprocess.Popen[str] | None = None
    thread: threading.Thread | None = None
    ended: bool = False

    def begin(self, measured: MeasuredRun) -> None:
        """Plans by what the run has measured, beside it."""
        self.thread = threading.Thread(
            target=self._try, args=(measured,), name="retune", daemon=True
        )
        self.thread.start()

    def adopt(self) -> bool:
        """Returns whether the run goes on under another plan from the checkpoint that it is at."""
        if self.found is None or self.ended:
            return False
        write_whole(self.job.run / RETUNED, self.found.model_dump_json() + "\n")
        self.ended = True
        return True

    def end(self) -> None:
        """Ends the planning, if it still goes on."""
        if self.ended:
            return
        self.ended = True
        if self.thread is None or self.thread.is_alive():
            self.say("pd-train: --retune: the run ended before another plan was made")
        if self.process is not None:
            with suppress(OSError):
                self.process.kill()
        if self.thread is not None:
            self.thread.join()

    def _try(self, measured: MeasuredRun) -> None:
        try:
            line = self._decide(measured)
        except (UserError, OSError) as error:
            words = error.format_message() if isinstance(error, UserError) else str(error)
            line = f"the plan stays, as there is no other: {words.removeprefix('--retune: ')}"
        if not self.ended:
            self.say(f"pd-train: --retune: {line}")

    def _decide(self, measured: MeasuredRun) -> str:
        """Returns in words what became of it."""
        last, now = _last(self.job), measured.seconds_per_minibatch
        noise = max(_RUN_TO_RUN, measured.noise)
        if last is not None and (last.returned or now > last.before * (1 - noise)):
            return self._after_no_gain(last, now, noise)
        number = 1 if last is None else last.number + 1
        folder = _folder(self.job, number)
        plan = self._plan(measured, number)
        seconds, gain = plan.predicted.seconds_in_a_run, plan.predicted.gain or 0.0
        if gain <= noise:
            best = f"the best other is {gain:.1%} faster" if gain > 0 else "none is faster"
            return f"the plan stays: by the times of this run {best}" + (
                f", and that is within the noise of {noise:.1%}" if gain > 0 else ""
            )
        if not _restarts_left():
            return f"the plan stays, though one is {gain:.1%} faster: torchrun has no restarts left"
        under(self.job, plan, folder)
        self.found = Retuned(number=number, before=now)
        return (
            f"goes on under {folder}/plan.json at the next checkpoint: {plan_in_words(plan)},"
            f" {gain:.1%} faster by the times of this run, expected {show_seconds(seconds)} a"
            f" minibatch; before {plan_in_words(self.job.plan)}"
        )

    def _after_no_gain(self, last: Retuned, now: float, noise: float) -> str:
        """Goes back to the plan before, if that was faster. Makes no further plan."""
        if last.returned:
            return "the plan stays: it was faster than another that was tried"
        before = show_seconds(last.before)
        times = f"{show_seconds(now)} a minibatch, and {before} under the plan before"
        if now < last.before * (1 + noise) or not _restarts_left():
            return f"the plan stays: {times}; without a gain no further one is made"
        self.found = last.model_copy(update={"returned": True})
        return f"goes back to the plan before at the next checkpoint: {times}"

    def _plan(self, measured: MeasuredRun, number: int) -> Plan:
        """Runs pd-optimize with what this run has measured, under this plan and those before."""
        assert self.job.retune is not None
        folder = _folder(self.job, number)
        folder.mkdir(exist_ok=True)
        own = measured.model_copy(update={"plan": moved(measured.plan, self.job.run, folder)})
        write_measured(own, folder / MEASURED)
        runs = (("--calibrate", str(_folder(self.job, n))) for n in range(1, number + 1))
        options = [word for pair in runs for word in pair]
        if all(stage.mesh is None for stage in self.job.plan.stages):
            options += ["--intra-op", "none"]  # the run config may be for whole stages alone
        graph = self.job.retune.with_name("graph.txt")
        error = run_pd_optimize(graph, [*options, "-o", str(folder)], self._started)
        if error is not None:
            raise UserError(error)
        return moved(read_plan(folder / "plan.json"), folder, self.job.run)

    def _started(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        if self.ended:
            process.kill()
