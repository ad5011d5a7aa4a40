"""pd-train on plans with an order of their own: several stages on a rank, backward in two halves.

Orders that are not shipped are in tests/support/pipelines.py; what is learnt is compared with the
plain model, in float64.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from commands import typed
from order_runs import (
    ADAM,
    MOMENTUM,
    assert_as_plain,
    on_ranks,
    plan_of,
    prepare,
    train,
    unequal_times,
)
from training import run_jobs

from pipedream.graph.measured_run import read_measured
from pipedream.graph.plan import write_plan
from pipedream.runtime.checkpoint.files import load_all
from pipedream.runtime.report.recording import read_trace
from pipedream.runtime.run.job import Job
from pipedream.schedule.action import Kind
from pipedream.schedule.orders.literature import loop, vee

TWICE_TWO = [[0], [1], [0], [1]]


@pytest.mark.slow
@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("model", "ranks", "changes"),
    [
        ("Chain", TWICE_TWO, {"optimizer": ADAM, "clip_norm": 0.05}),
        ("Skips", TWICE_TWO, {"optimizer": MOMENTUM}),
        ("Chain", [[0], [0], [0]], {"optimizer": MOMENTUM, "clip_norm": 0.05}),
        ("Chain", TWICE_TWO, {"optimizer": MOMENTUM, "clip_norm": 0.05, "loss_scale": 1024.0}),
    ],
)
def test_several_stages_on_a_rank(
    tmp_path: Path, model: str, ranks: list[list[int]], changes: dict[str, object]
) -> None:
    """Interleaved 1F1B. The norm is that of all gradients, found once in each round."""
    config = prepare(tmp_path, model, "interleaved", ranks, **changes)
    train(tmp_path, "--trace")
    assert_as_plain(tmp_path, config)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    workers = [(rank["rank"], rank["stage"]) for rank in summary["ranks"]]
    assert workers == sorted((own[0], stage) for stage, own in enumerate(ranks))
    measured = read_measured(tmp_path / "run/measured.json")
    assert [(rank.rank, rank.stage) for rank in measured.ranks] == workers
    events = [event for own in read_trace(tmp_path / "run/timeline.csv").values() for event in own]
    norms = Counter(event.action.stage for event in events if event.action.kind == Kind.NORM)
    assert norms == (dict.fromkeys(range(len(ranks)), 3) if "clip_norm" in changes else {})


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize(("model", "stages"), [("Chain", 2), ("Chain", 3), ("Tied", 3)])
def test_backward_passes_in_two_halves(tmp_path: Path, model: str, stages: int) -> None:
    """ZB-H1; the last of the rounds of five is smaller. The first and the last stage of Tied add up
    the gradients of the weight that both hold.
    """
    ranks = [[stage] for stage in range(stages)]
    changes = {"optimizer": MOMENTUM, "clip_norm": 0.05, "microbatches": 5}
    config = prepare(tmp_path, model, "zb-h1", ranks, **changes)
    train(tmp_path)
    assert_as_plain(tmp_path, config)


@pytest.mark.thorough
@pytest.mark.parametrize("changes", [{}, {"autocast": "bfloat16", "dtype": "float32"}])
def test_halves_drop_what_whole_passes_drop(tmp_path: Path, changes: dict[str, object]) -> None:
    """With dropout, batch norm and a smaller last minibatch, on two replicas of the second stage;
    the model is captured once more for that, so it has other programs.
    """
    data = {"source": "small_models:classes", "args": {"examples": 68}}
    ranks, rest = [[0], [1, 2]], {"drop_last": False, "evaluate_every": None, "data": data}
    for order, run in ((None, "whole"), ("halved", "halves")):
        prepare(tmp_path, "Noisy", "halved", ranks, optimizer=MOMENTUM, **rest, **changes)
        write_plan(plan_of("Noisy", order, ranks, 4), tmp_path / f"{run}.json")
        train(tmp_path, "--no-evaluate", plan=f"{run}.json", run=run)
    one, other = (load_all(tmp_path / run / "checkpoints/latest") for run in ("whole", "halves"))
    assert one.keys() == other.keys()
    close = 1e-12 if not changes else 1e-6
    torch.testing.assert_close(one, other, rtol=0.0, atol=close)


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", ["2bw", "weight-stashing"])
def test_stages_that_share_a_rank_learn_what_they_do_on_ranks_of_their_own(
    tmp_path: Path, schedule: str
) -> None:
    """The last stage comes to its update when the first, on its rank, is yet to go backward, and
    goes on with minibatches of the next round. 2bw has one norm for all stages.
    """
    own = [[0], [1], [2], [3]]
    changes = {"optimizer": MOMENTUM, "clip_norm": 0.05, "evaluate_every": None}
    prepare(tmp_path, "Chain", "merged", [[0], [1], [1], [0]], **changes)
    write_plan(plan_of("Chain", None, own, 4), tmp_path / "own.json")
    train(tmp_path, "--schedule", schedule, "--no-evaluate")
    train(tmp_path, "--schedule", schedule, "--no-evaluate", plan="own.json", run="other")
    one, other = (load_all(tmp_path / run / "checkpoints/latest") for run in ("run", "other"))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-12, atol=1e-12)


@pytest.mark.thorough
def test_stages_that_share_a_rank_find_one_loss_scale(tmp_path: Path) -> None:
    """The first updates overflow in some stages, and are left out by all."""
    changes = {"optimizer": ADAM, "autocast": "float16", "dtype": "float32", "evaluate_every": None}
    prepare(tmp_path, "Steep", "interleaved", TWICE_TWO, **changes)
    write_plan(plan_of("Steep", None, [[0], [1], [2], [3]], 4), tmp_path / "own.json")
    train(tmp_path, "--no-evaluate")
    train(tmp_path, "--no-evaluate", plan="own.json", run="other")
    one, other = (load_all(tmp_path / run / "checkpoints/latest") for run in ("run", "other"))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
    for run in ("run", "other"):
        ranks = json.loads((tmp_path / run / "summary.json").read_text())["ranks"]
        (skipped,) = {rank["updates_left_out"] for rank in ranks}
        assert 0 < skipped < 9


@pytest.mark.thorough
def test_a_run_goes_on_under_a_plan_of_another_order(tmp_path: Path) -> None:
    """And back: interleaved, then one stage with two replicas, then interleaved once more."""
    config = prepare(tmp_path, "Chain", "interleaved", TWICE_TWO, optimizer=ADAM)
    other = plan_of("Chain", None, [[0, 1]], config.microbatches)
    write_plan(other, tmp_path / "other.json")
    assert "order" not in json.loads((tmp_path / "other.json").read_text())
    train(tmp_path, "--epochs", "1")
    train(tmp_path, "--epochs", "2", "--resume", "--save-every", "4", plan="other.json")
    train(tmp_path, "--resume")
    assert_as_plain(tmp_path, config)


@pytest.mark.thorough
def test_a_run_goes_on_from_order_to_order(tmp_path: Path) -> None:
    """Four stages in a V, then two larger ones with halves, then three of 1F1B, then four in turn.
    A weight is held by two of them.
    """
    config = prepare(tmp_path, "Tied", "zb-v", [[0], [1]], optimizer=ADAM, epochs=4)
    orders = (("zb-v", vee(2, 2)), ("zb-h1", loop(2, 1)), (None, loop(3, 1)))
    jobs = [
        Job(
            plan_of("Tied", order, on_ranks(rank_map), config.microbatches),
            config,
            tmp_path,
            tmp_path / "run",
            schedule="flush",
            epochs=epochs,
            resume=epochs > 1,
        )
        for epochs, (order, rank_map) in enumerate([*orders, ("interleaved", loop(2, 2))], 1)
    ]
    run_jobs(jobs)
    assert_as_plain(tmp_path, config)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("order", "ranks", "killed"), [("zb-v", vee(2, 2), 0), ("auto", loop(2, 1), 1)]
)
def test_a_killed_rank_is_named_and_the_run_goes_on(
    tmp_path: Path, order: str, ranks: tuple[int, ...], killed: int
) -> None:
    """The run ends with one line, or goes on from its checkpoint to the very same end. Rank 0 of a
    V has the first and the last stage, and all data.
    """
    times = unequal_times(2, 9.0) if order == "auto" else None
    data = {"args": {}, "source": "small_models:classes"}
    changes = {"optimizer": MOMENTUM, "epochs": 3, "clip_norm": 0.05}
    prepare(tmp_path, "Chain", order, on_ranks(ranks), data=data, **changes)
    write_plan(plan_of("Chain", order, on_ranks(ranks), 4, times=times), tmp_path / "plan.json")
    train(tmp_path, run="whole")
    data = {"args": {"rank": killed}, "source": "small_models:deadly"}
    prepare(tmp_path, "Chain", order, on_ranks(ranks), data=data, **changes)
    write_plan(plan_of("Chain", order, on_ranks(ranks), 4, times=times), tmp_path / "plan.json")
    words = ["pd-train", "plan.json", "--config", "run.yaml", "--save-every", "4", "-o"]
    done = typed(tmp_path, [*words, "lost"])
    line = rf"pd-train: rank {killed} was killed by SIGKILL in epoch [12] at \S+, minibatch \d+; "
    (said,) = (each for each in done.error.splitlines() if each.startswith("pd-train: "))
    assert re.fullmatch(line + "all workers stopped", said)
    assert done.code == 1
    at_work = (os.path.realpath(own) for own in Path("/proc").glob("[0-9]*/cwd"))
    assert str(tmp_path.resolve()) not in at_work
    done = typed(tmp_path, [*words, "again", "--max-restarts", "1"])
    (said,) = (each for each in done.error.splitlines() if each.startswith("pd-train: "))
    assert re.fullmatch(line + "restart 1 of 1", said)
    assert done.code == 0, done.error
    one, other = (load_all(tmp_path / run / "checkpoints/latest") for run in ("whole", "again"))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize(
    ("order", "ranks", "says"),
    [
        ("zigzag", [[0], [1]], "order 'zigzag' of the plan is not known: 1f1b, "),
        (
            "interleaved",
            [[0], [1], [1], [0]],
            "order interleaved of the plan is for stages that are on the ranks as `loop` says",
        ),
        ("1f1b", [[0], [1], [0]], "rank 0 is in stages 0 and 2: order 1f1b runs one stage on each"),
    ],
)
def test_an_order_that_does_not_fit_is_refused_in_one_line(
    tmp_path: Path, order: str, ranks: list[list[int]], says: str
) -> None:
    prepare(tmp_path, "Chain", "interleaved", ranks, optimizer=MOMENTUM)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"order": order}))
    done = typed(tmp_path, ["pd-train", "plan.json", "--config", "run.yaml", "-o", "run"])
    assert done.code == 2
    assert says in done.error
    assert len(done.error.strip().splitlines()) == 1


GOOD = unequal_times(4, 9.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"forward": [1.0] * 3}, "order_times: forward has 3 numbers for 4 stages"),
        ({"backward_weight": [1.0, -1.0, 1.0, 1.0]}, "order_times.backward_weight.1: -1.0 is too"),
        ({"forward": [float("nan")] * 4}, "order_times.forward.0: nan is not a finite number"),
        ({"held_bytes": [1e300] * 4}, "order_times.held_bytes.0: 1e+300 is too large"),
        ({"kept_bytes": [1.5] * 4}, "order_times: stage 0 keeps 1.5 bytes of 1.0 held"),
        (
            {"links": [{"source": 1, "target": 4, "there": 1.0, "back": 1.0}]},
            "order_times: no link leads from stage 1 to 4",
        ),
        ({"links": [*GOOD["links"], *GOOD["links"]]}, "order_times: a link is there twice"),
        (
            {"limit_bytes": 4.0},
            "order auto of the plan: limit_bytes 4 has no room for one microbatch, of which a rank "
            "holds 5: make a plan",
        ),
    ],
)
def test_wrong_times_of_an_order_are_refused_in_one_line(
    tmp_path: Path, wrong: dict[str, object], says: str
) -> None:
    prepare(tmp_path, "Chain", "auto", on_ranks(vee(2, 2)), optimizer=MOMENTUM)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"order_times": GOOD | wrong}))
    done = typed(tmp_path, ["pd-train", "plan.json", "--config", "run.yaml", "-o", "run"])
    assert done.code == 2
    assert says in done.error
    assert len(done.error.strip().splitlines()) == 1


@pytest.mark.thorough
def test_an_order_to_be_found_without_times_takes_all_passes_for_alike(tmp_path: Path) -> None:
    changes = {"optimizer": ADAM, "evaluate_every": None, "epochs": 1}
    config = prepare(tmp_path, "Chain", "auto", on_ranks(loop(2, 2)), **changes)
    train(tmp_path, "--no-evaluate")
    assert_as_plain(tmp_path, config)
