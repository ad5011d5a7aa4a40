"""pd-train on plans with an order of their own: several stages on a rank, backward in two halves.

The orders are written by hand in tests/support/pipelines.py; what is learnt is compared with the
plain model, in float64.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import small_models
import torch
import yaml
from commands import typed
from plans import cut, make_plan
from torch import Tensor, nn

from pipedream.capture.export import capture
from pipedream.graph.measured_run import read_measured
from pipedream.graph.plan import Plan, write_plan
from pipedream.graph.run_config import RunConfig, read_config
from pipedream.runtime.checkpoint.files import latest, load_all
from pipedream.runtime.checkpoint.plain_model import load_plain
from pipedream.runtime.data.reader import Epoch
from pipedream.runtime.report.recording import read_trace
from pipedream.schedule.action import Kind

CPU = torch.device("cpu")
MOMENTUM = {"name": "SGD", "args": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}}
ADAM = {"name": "AdamW", "args": {"lr": 0.02}}
CONFIG = {
    "format": "pipedream-run/1",
    "data": {"source": "small_models:classes", "args": {"examples": 66}},
    "batch_size": 4,
    "drop_last": True,
    "microbatches": 4,
    "epochs": 3,
    "seed": 3,
    "dtype": "float64",
    "evaluate_every": 1,
}
"""49 examples are twelve minibatches, three rounds; 17 are held out, the last by itself."""


def prepare(
    folder: Path, model: str, order: str, ranks: Sequence[Sequence[int]], **changes: object
) -> RunConfig:
    """run.yaml and plan.json; each stage is on these ranks."""
    text = CONFIG | {"model": {"source": f"small_models:{model}"}} | changes
    (folder / "run.yaml").write_text(yaml.safe_dump(text))
    config = read_config(folder / "run.yaml")
    write_plan(plan_of(model, order, ranks, config.microbatches), folder / "plan.json")
    return config


def plan_of(model: str, order: str | None, ranks: Sequence[Sequence[int]], in_flight: int) -> Plan:
    graph = capture(getattr(small_models, model)(), (torch.randn(4, 6),)).graph
    made = make_plan(graph, cut(graph, len(ranks)), [len(own) for own in ranks], "flush")
    data = made.model_dump(exclude_none=True) | ({"order": order} if order else {})
    for stage, own in zip(data["stages"], ranks, strict=True):
        stage |= {"ranks": tuple(own), "in_flight": max(in_flight, len(ranks))}
    return Plan.model_validate(data)


def train(folder: Path, *options: str, plan: str = "plan.json", run: str = "run") -> None:
    command = ["pd-train", plan, "--config", "run.yaml", "-o", run, *options]
    done = typed(folder, command)
    assert done.code == 0, done.error


def plain(config: RunConfig) -> tuple[list[float], nn.Module, list[float]]:
    """The losses of the plain model, the model, and its held-out losses after each epoch."""
    torch.manual_seed(config.seed)
    model = getattr(small_models, config.model.source.partition(":")[2])().double()
    optimizer = getattr(torch.optim, config.optimizer.name)(
        model.parameters(), **config.optimizer.args
    )
    data, held_out = small_models.classes(**config.data.args)
    losses: list[float] = []
    tried: list[float] = []
    for number in range(1, config.epochs + 1):
        epoch = Epoch(data, config, number, CPU)
        for first in range(0, len(epoch), config.microbatches):
            numbers = range(first, min(first + config.microbatches, len(epoch)))
            batches = [epoch.batch(index) for index in numbers]
            each = [loss_of(model, batch.inputs[0], batch.target) for batch in batches]
            (sum(each) / len(each)).backward()  # type: ignore[union-attr]
            if config.clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            losses += [loss.item() for loss in each]
        x, y = held_out.tensors
        with torch.no_grad():
            tried.append(loss_of(model, x.double(), y).item())
    return losses, model, tried


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def assert_as_plain(folder: Path, config: RunConfig) -> None:
    """Losses, weights, held-out losses; and the checkpoint is one that the plain model loads."""
    expected, model, held_out = plain(config)
    lines = map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
    assert [line["loss"] for line in lines] == pytest.approx(expected, rel=1e-12)
    path = latest(folder / "run/checkpoints")
    assert path is not None
    assert load_all(path).keys() == dict(model.named_parameters()).keys()
    fresh = type(model)().double()
    load_plain(fresh, path)
    for one, other in zip(fresh.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    tried = map(json.loads, (folder / "run/held_out.jsonl").read_text().splitlines())
    assert [line["held_out_loss"] for line in tried] == pytest.approx(held_out, rel=1e-12)


TWICE_TWO = [[0], [1], [0], [1]]


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
