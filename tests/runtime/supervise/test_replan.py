"""Fewer workers than the plan has: pd-optimize plans for those, and training goes on."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import small_models
import torch
from commands import typed
from plans import cut, make_plan
from processes import free_port, run_processes
from sharded_runs import PROFILE, write_config
from torch.distributed import HashStore
from training import losses, run_jobs, weights

from pipedream.capture.export import capture
from pipedream.comm.rank_info import RankInfo
from pipedream.graph.errors import UserError
from pipedream.graph.model import Graph, format_graph
from pipedream.graph.plan import PlanningOptions, read_plan, write_plan
from pipedream.graph.run_config import read_config
from pipedream.runtime.run.job import Job
from pipedream.runtime.supervise.replan import replanned
from pipedream.runtime.trainer import train

SUPPORT = Path(small_models.__file__).parent
CONFIG = """\
format: pipedream-run/1
model: {source: "small_models:Chain"}
data: {source: "small_models:deadly", args: {rank: 2, real: true}}
loss: mse_loss
optimizer: {name: AdamW, args: {lr: 0.05}}
batch_size: 4
dtype: float64
epochs: 2
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run config, and in `plan` a plan for three workers and the graph it was made from."""
    graph = capture(small_models.Chain(), (torch.randn(4, 6),)).graph
    slow = {name: replace(node, forward_seconds=1e-3) for name, node in graph.nodes.items()}
    plan = make_plan(graph, cut(graph, 3), (1, 1, 1), "flush")
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan/graph.txt").write_text(format_graph(Graph(slow, graph.edges)))
    (tmp_path / "run.yaml").write_text(CONFIG)
    write_plan(
        plan.model_copy(update={"asked": PlanningOptions(straight=True)}),
        tmp_path / "plan/plan.json",
    )
    return tmp_path


def job_of(folder: Path, **asked: object) -> Job:
    """The run that `pd-train --replan` would make of it; the plan asked for something else, too."""
    path = folder / "plan/plan.json"
    plan = read_plan(path)
    if asked:
        plan = plan.model_copy(update={"asked": PlanningOptions.model_validate(asked)})
        write_plan(plan, path)
    config = read_config(folder / "run.yaml")
    options = {"schedule": plan.schedule, "epochs": config.epochs, "replan": path}
    return Job(plan, config, SUPPORT, folder / "run", **options)  # type: ignore[arg-type]


def rank_info(rank: int, workers: int, port: int = 0) -> RankInfo:
    return RankInfo(rank, workers, rank, workers, "127.0.0.1", port)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_run_goes_on_with_the_workers_that_are_left(folder: Path) -> None:
    """Of three one is killed; later two are started. Losses are those of a run in which nothing
    happened.
    """
    whole = replace(job_of(folder), run=folder / "whole", epochs=3)
    run_jobs([whole])
    train = ["pd-train", "plan/plan.json", "--config", "run.yaml", "-o", "run", "--replan"]
    done = typed(folder, [*train, "--save-every", "4"], seconds=100)
    assert done.code == 0, done.error
    killed, again = (line for line in done.error.splitlines() if line.startswith("pd-train: "))
    assert re.fullmatch(
        r"pd-train: rank 2 was killed by SIGKILL in epoch \d at 2\S+, minibatch \d+; going on with "
        "2 workers",
        killed,
    )
    assert re.fullmatch(
        r"pd-train: planned again for 2 of 3 workers: 1 \+ 1 at .* ms per minibatch, before "
        r"1 \+ 1 \+ 1 at 0 us; run/plan-2/plan.json",
        again,
    )
    kept, made = (read_plan(folder / path) for path in ("plan/plan.json", "run/plan-2/plan.json"))
    assert (kept.replicas, made.replicas) == ((1, 1, 1), (1, 1))
    stages = sorted(path.name for path in (folder / "run").glob("stage*"))
    assert stages == ["stage0.py", "stage1.py"]
    found = replace(whole, run=folder / "run", resume=True)
    run_processes(_train, 2, found, free_port())
    assert losses(found) == pytest.approx(losses(whole), rel=1e-12)
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(weights(found)[name], tensor, rtol=1e-12, atol=1e-12)


@pytest.mark.thorough
@pytest.mark.slow
def test_workers_are_too_few_from_the_beginning(folder: Path) -> None:
    train = ["pd-train", "plan/plan.json", "--config", "run.yaml", "-o", "run", "--workers", "1"]
    done = typed(folder, train)
    assert (done.code, done.error) == (
        2,
        "pd-train: --workers 1: the plan is for 3 workers; make another with pd-optimize, or for "
        "fewer with --replan\n",
    )
    done = typed(folder, [*train, "--replan"])
    assert done.code == 0, done.error
    assert read_plan(folder / "run/plan-1/plan.json").replicas == (1,)


def _train(rank: int, workers: int, job: Job, port: int) -> None:
    train(job, rank_info(rank, workers, port))


@pytest.mark.thorough
@pytest.mark.slow
def test_workers_that_the_plan_does_not_use_leave(folder: Path) -> None:
    """Through a slow network one worker is better than two."""
    job = job_of(folder, straight=False, fewer_machines=True)
    slow = job.plan.cluster.model_copy(update={"bandwidth": (1.0,)})
    write_plan(job.plan.model_copy(update={"cluster": slow}), folder / "plan/plan.json")
    run_processes(_train, 2, replace(job, epochs=1), free_port())
    assert read_plan(folder / "run/plan-2/plan.json").workers == 1
    assert len(losses(job)) == 16


@pytest.mark.slow
def test_all_hear_of_the_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job, store = job_of(folder), HashStore()
    found = [replanned(job, rank_info(rank, 2), store) for rank in range(2)]
    assert found[0][0] == found[1][0]
    assert found[0][0].plan == read_plan(folder / "run/plan-2/plan.json")
    assert found[0][0].plan_folder == folder / "run/plan-2"
    assert [rank_info.world_size for _, rank_info in found] == [2, 2]
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.slow
def test_all_hear_that_nothing_fits(folder: Path) -> None:
    job, store = job_of(folder, memory="1kB"), HashStore()
    for rank in range(2):
        with pytest.raises(
            UserError, match=r"^--replan for 2 of 3 workers: --memory 1 kB: no plan"
        ):
            replanned(job, rank_info(rank, 2), store)


@pytest.mark.slow
def test_too_few_microbatches_for_the_new_plan(folder: Path) -> None:
    """They are looked at again: the run config may have too few for what pd-optimize chooses."""
    job = job_of(folder)
    config = job.config.model_copy(update={"microbatches": 1})
    with pytest.raises(UserError, match="microbatches: 1"):
        replanned(replace(job, schedule="2bw", config=config), rank_info(0, 2), HashStore())


@pytest.mark.slow
def test_more_workers_than_planned_are_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="for 3 workers and 4 were started"):
        train(job_of(folder), rank_info(0, 4))
    with pytest.raises(UserError, match="start 3, fewer with --replan"):
        train(replace(job_of(folder), replan=None), rank_info(0, 2))


@pytest.mark.slow
def test_there_has_to_be_a_graph_to_plan_from(folder: Path) -> None:
    job = job_of(folder)
    job.check_replan()
    other = capture(small_models.Noisy(), (torch.randn(4, 6),)).graph
    (folder / "plan/graph.txt").write_text(format_graph(other))
    with pytest.raises(UserError, match=r"graph.txt is not the graph that .*plan.json was made"):
        job.check_replan()
    (folder / "plan/graph.txt").unlink()
    with pytest.raises(UserError, match=r"^--replan: there is no .*graph.txt: pd-optimize writes"):
        job.check_replan()
    replace(job, replan=None).check_replan()


@pytest.mark.slow
def test_plans_on_meshes_are_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of four workers, two teams, two are left: one team. It learns what both would have."""
    config = write_config(tmp_path, "Perceptron", microbatches=2, evaluate_every=None)
    links = ["--machines", "4", "--bandwidth", "1TB", "--schedule", "flush", "--microbatches", "2"]
    for words in (
        PROFILE,
        ["pd-optimize", "graph.txt", *links, "--mesh", "2", "--straight", "-o", "plan"],
    ):
        done = typed(tmp_path, words)
        assert done.code == 0, done.error
    path = tmp_path / "plan/plan.json"
    plan = read_plan(path)
    whole = Job(plan, config, tmp_path, tmp_path / "whole", schedule="flush", epochs=2)
    job = replace(whole, run=tmp_path / "run", replan=path)
    job.check()
    run_jobs([whole])
    run_jobs([replace(job, epochs=1)])
    run_processes(_train, 2, replace(job, resume=True), free_port())
    made = read_plan(tmp_path / "run/plan-2/plan.json")
    assert [(stage.mesh, stage.ranks) for stage in plan.stages] == [((2,), (0, 1)), ((2,), (2, 3))]
    assert [(stage.mesh, stage.ranks) for stage in made.stages] == [((2,), (0, 1))]
    assert losses(job) == pytest.approx(losses(whole), rel=1e-12)
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(weights(job)[name], tensor, rtol=1e-12, atol=1e-12)
    replanned(job, rank_info(0, 2), HashStore())
    assert "2 of 4 workers: 1 of 2 devices at" in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.slow
def test_plans_without_meshes_stay_so(folder: Path) -> None:
    """The run config may be for whole stages alone: it may compile them."""
    job, _ = replanned(job_of(folder), rank_info(0, 2), HashStore())
    assert job.plan.asked is not None
    assert job.plan.asked.intra_op == "none"
