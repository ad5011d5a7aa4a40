"""A plan made from wrong times: it is measured, made again, and trained on."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sleeping_layers
import torch
from commands import typed
from plans import make_plan
from torch.distributed import HashStore
from training import losses, run_jobs, weights

from pipedream.capture.export import capture
from pipedream.comm.rank_info import RankInfo
from pipedream.graph.errors import UserError
from pipedream.graph.measured_run import MEASURED, MeasuredRank, MeasuredRun, read_measured
from pipedream.graph.model import Graph, format_graph
from pipedream.graph.plan import Plan, read_plan, write_plan
from pipedream.graph.profile import Quartiles
from pipedream.graph.run_config import read_config
from pipedream.runtime.run.job import Job
from pipedream.runtime.supervise import retune
from pipedream.runtime.supervise.retune import RETUNED, Retuned, Retuner, check_launcher, retuned

SUPPORT = Path(sleeping_layers.__file__).parent
CONFIG = """\
format: pipedream-run/1
model: {source: "sleeping_layers:chain"}
data: {source: "sleeping_layers:data", args: {examples: 480}}
loss: mse_loss
optimizer: {name: AdamW, args: {lr: 0.01}}
batch_size: 2
dtype: float64
microbatches: 8
epochs: 2
"""
MINIBATCHES = 2 * 240


def made(folder: Path, times: float) -> Path:
    """Plans for two workers, with the last layer that sleeps taken to sleep so many times as long,
    in `plan`.
    """
    graph = capture(sleeping_layers.chain(), (torch.randn(2, 6),)).graph
    asleep = [name for name, node in graph.nodes.items() if node.description == "Layer"]
    assert len(asleep) == 6
    seconds = dict.fromkeys(asleep, sleeping_layers.SECONDS)
    seconds[asleep[-1]] *= times
    nodes = {
        name: replace(
            node,
            forward_seconds=seconds.get(name, 1e-5),
            backward_seconds=seconds.get(name, 1e-5),
        )
        for name, node in graph.nodes.items()
    }
    (folder / "graph.txt").write_text(format_graph(Graph(nodes, graph.edges)))
    (folder / "run.yaml").write_text(CONFIG)
    links = ["--machines", "2", "--bandwidth", "1GB", "--straight", "--schedule", "flush"]
    done = typed(folder, ["pd-optimize", "graph.txt", *links, "--microbatches", "8", "-o", "plan"])
    assert done.code == 0, done.error
    return folder / "plan/plan.json"


def layers(plan: Plan) -> list[int]:
    """How many layers that sleep each stage has."""
    asleep = {n.id for n in plan.graph.nodes if n.description == "Layer"}
    return [len(asleep.intersection(stage.nodes)) for stage in plan.stages]


def job_of(folder: Path, **changes: Any) -> Job:
    path = folder / "plan/plan.json"
    config = read_config(folder / "run.yaml")
    job = Job(read_plan(path), config, SUPPORT, folder / "run", schedule="flush", epochs=2)
    return replace(job, save_every=80, retune=path, **changes)


@pytest.mark.slow
def test_a_plan_of_wrong_times_is_changed(tmp_path: Path) -> None:
    """Of six equal layers one was profiled five times too long. Losses and weights are those of a
    run under either plan.
    """
    plan = made(tmp_path, 5)
    assert layers(read_plan(plan)) == [5, 1]
    train = ["pd-train", "plan/plan.json", "--config", "run.yaml", "-o", "run", "--retune"]
    done = typed(tmp_path, [*train, "--save-every", "80"], seconds=120)
    assert done.code == 0, done.error
    lines = [line for line in done.error.splitlines() if "--retune" in line]
    assert "goes on under run/retune-1/plan.json at the next checkpoint: 1 + 1" in lines[0]
    assert layers(read_plan(tmp_path / "run/retune-1/plan.json")) == [3, 3]
    assert layers(read_measured(tmp_path / "run/measured.json").plan) == [3, 3]
    assert len(lines) == 2, done.error
    assert "the plan stays" in lines[1] or "the run ended before" in lines[1]
    before = read_measured(tmp_path / "run/retune-1/measured.json")
    after = read_measured(tmp_path / "run/measured.json")
    assert layers(before.plan) == [5, 1]
    assert after.seconds_per_minibatch < before.seconds_per_minibatch
    whole = replace(job_of(tmp_path), run=tmp_path / "whole", retune=None, save_every=None)
    run_jobs([whole])
    found = replace(whole, run=tmp_path / "run")
    assert len(losses(found)) == MINIBATCHES
    assert losses(found) == pytest.approx(losses(whole), rel=1e-12)
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(weights(found)[name], tensor, rtol=1e-12, atol=1e-12)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_plan_of_right_times_stays(tmp_path: Path) -> None:
    assert layers(read_plan(made(tmp_path, 1))) == [3, 3]
    train = ["pd-train", "plan/plan.json", "--config", "run.yaml", "-o", "run", "--retune"]
    done = typed(tmp_path, [*train, "--save-every", "80"], seconds=120)
    assert done.code == 0, done.error
    (line,) = (line for line in done.error.splitlines() if "--retune" in line)
    assert line.startswith("pd-train: --retune: the plan stays: by the times of this run")
    assert not (tmp_path / "run" / RETUNED).exists()
    assert done.error.count("training: ") == 1
    table = done.error[done.error.index("after 48 minibatches") :].splitlines()
    assert table[1].split() == ["stage", "compute", "waiting", "exchange"]


def small(folder: Path) -> Job:
    """A run under a plan that needs no pd-optimize."""
    graph = capture(sleeping_layers.chain(), (torch.randn(2, 6),)).graph
    names = list(graph.order)
    folder.joinpath("plan").mkdir()
    folder.joinpath("plan/graph.txt").write_text(format_graph(graph))
    folder.joinpath("run.yaml").write_text(CONFIG)
    write_plan(make_plan(graph, [names[:9], names[9:]], (1, 1), "flush"), folder / "plan/plan.json")
    job = job_of(folder)
    job.run.mkdir()
    return replace(job, config=job.config)


def measured(job: Job, seconds: float, varying: float = 0.0) -> MeasuredRun:
    passes = Quartiles(median=seconds / 2, lower=seconds / 2 - varying, upper=seconds / 2 + varying)
    ranks = [
        MeasuredRank(
            rank=rank,
            stage=rank,
            replica=0,
            minibatches=100,
            forward=passes,
            backward=passes,
            updates=0,
        )
        for rank in range(2)
    ]
    return MeasuredRun(
        device="cpu",
        threads=1,
        batch_size=2,
        schedule="flush",
        seconds_per_minibatch=seconds,
        ranks=tuple(ranks),
        plan=job.plan,
    )


def decided(job: Job, run: MeasuredRun, gain: float, monkeypatch: pytest.MonkeyPatch) -> Retuner:
    """What rank 0 makes of it, where pd-optimize finds a plan of this gain; its line in `words`."""

    def found(graph: Path, options: list[str], started: object) -> None:
        folder = Path(options[-1])
        assert read_measured(folder / MEASURED) == run
        predicted = job.plan.predicted.model_copy(update={"gain": gain})
        write_plan(job.plan.model_copy(update={"predicted": predicted}), folder / "plan.json")
        shutil.copy(graph, folder)

    monkeypatch.setattr(retune, "run_pd_optimize", found)
    words: list[str] = []
    retuner = Retuner(job, words.append)
    retuner.begin(run)
    assert retuner.thread is not None
    retuner.thread.join()
    (line,) = words
    assert line.startswith("pd-train: --retune: ")
    monkeypatch.setattr(retuner, "words", line, raising=False)
    return retuner


def last(job: Job) -> Retuned:
    return Retuned.model_validate_json((job.run / RETUNED).read_text())


def test_only_a_gain_above_the_noise_changes_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = small(tmp_path)
    for gain, words in ((0.0, "none is faster"), (0.015, "within the noise of 2.0%")):
        retuner = decided(job, measured(job, 0.01), gain, monkeypatch)
        assert words in retuner.words
        assert not retuner.adopt()
    # Half of the passes are within 20 % of the median: 1.57 * 0.4 / 10 of it is not known.
    noisy = measured(job, 0.01, varying=0.001)
    assert not decided(job, noisy, 0.06, monkeypatch).adopt()
    assert decided(job, noisy, 0.07, monkeypatch).adopt()
    (job.run / RETUNED).unlink()
    assert decided(job, measured(job, 0.01), 0.03, monkeypatch).adopt()
    assert last(job) == Retuned(number=1, before=0.01)


def test_no_further_plan_is_made_without_a_gain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one would gain again, if one believed it."""
    job = small(tmp_path)
    assert decided(job, measured(job, 0.010), 0.3, monkeypatch).adopt()
    retuner = decided(job, measured(job, 0.0099), 0.3, monkeypatch)
    assert "without a gain no further one is made" in retuner.words
    assert not retuner.adopt()
    assert decided(job, measured(job, 0.008), 0.3, monkeypatch).adopt()
    assert last(job) == Retuned(number=2, before=0.008)
    options = job.run / "retune-2" / MEASURED
    assert options.exists()


def test_a_plan_that_is_slower_is_left_again_and_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = small(tmp_path)
    assert decided(job, measured(job, 0.010), 0.3, monkeypatch).adopt()
    retuner = decided(job, measured(job, 0.012), 0.3, monkeypatch)
    assert "goes back to the plan before" in retuner.words
    assert retuner.adopt()
    assert last(job) == Retuned(number=1, before=0.010, returned=True)
    changed, _ = retuned(replace(job, restarted=True), rank_info(), HashStore())
    assert changed.plan == job.plan
    assert changed.plan.predicted.gain is None
    retuner = decided(job, measured(job, 0.010), 0.3, monkeypatch)
    assert "the plan stays: it was faster" in retuner.words
    assert not retuner.adopt()


def test_all_ranks_go_on_under_the_plan_that_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a check of its passes, which a restart leaves out."""
    job, store = small(tmp_path), HashStore()
    restarted = replace(job, restarted=True)
    assert retuned(restarted, rank_info(), HashStore()) == (restarted, rank_info())
    assert decided(job, measured(job, 0.010), 0.3, monkeypatch).adopt()
    found = [retuned(restarted, rank_info(rank), store) for rank in range(2)]
    for changed, where in found:
        assert changed.plan.predicted.gain == 0.3
        assert changed.plan_folder == job.run / "retune-1"
        assert where.world_size == 2
        assert (changed.restarted, changed.resume) == (False, False)
    (job.run / "retune-1/plan.json").write_text("{")
    store = HashStore()
    for rank in range(2):
        with pytest.raises(UserError, match=r"retune-1/plan.json"):
            retuned(restarted, rank_info(rank), store)


def test_pd_optimize_that_fails_leaves_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, words = small(tmp_path), []
    monkeypatch.setattr(retune, "run_pd_optimize", lambda *_: "--memory 1 kB: no plan fits")
    retuner = Retuner(job, words.append)
    retuner.begin(measured(job, 0.01))
    assert retuner.thread is not None
    retuner.thread.join()
    assert words == [
        "pd-train: --retune: the plan stays, as there is no other: --memory 1 kB: no plan fits"
    ]
    assert not retuner.adopt()


def test_a_run_that_ends_first_says_so(tmp_path: Path) -> None:
    words: list[str] = []
    retuner = Retuner(small(tmp_path), words.append)
    retuner.end()
    retuner.end()
    assert words == ["pd-train: --retune: the run ended before another plan was made"]


def test_launchers_that_start_nothing_again_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_launcher(None)
    with pytest.raises(UserError, match=r"^--retune: mpirun and srun do not start"):
        check_launcher(rank_info())
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    with pytest.raises(UserError, match=r"give torchrun --max-restarts"):
        check_launcher(rank_info())
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    check_launcher(rank_info())


def test_what_cannot_be_planned_again_is_refused(tmp_path: Path) -> None:
    job = small(tmp_path)
    job.check_retune()
    with pytest.raises(UserError, match=r"one epoch, and no checkpoint before its end"):
        replace(job, epochs=1, save_every=None).check_retune()
    replace(job, epochs=2, save_every=None).check_retune()
    with pytest.raises(UserError, match=r"is for another schedule, batch size"):
        replace(job, schedule="gpipe").check_retune()
    other = job.plan.model_copy(update={"batch_size": 7})
    with pytest.raises(UserError, match=r"is for another schedule, batch size"):
        replace(job, plan=other).check_retune()
    (tmp_path / "plan/graph.txt").unlink()
    with pytest.raises(UserError, match=r"^--retune: there is no .*graph.txt"):
        job.check_retune()
    replace(job, retune=None).check_retune()


def rank_info(rank: int = 0) -> RankInfo:
    return RankInfo(rank, 2, rank, 2, "127.0.0.1", 0)
