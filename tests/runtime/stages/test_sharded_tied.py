"""Parameters that several stages have, of which some are on meshes; and that one stage has twice.

The model is a language model whose head has the weight of its embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import sharded_models
import torch
from safetensors.torch import load_file
from sharded_results import assert_alike, checkpoint, metrics
from sharded_runs import Case, alone, captured, job_of, train_cases
from torch import nn
from training import run_jobs

from pipedream.graph.placements.placement import Mesh
from pipedream.graph.plan import Plan
from pipedream.graph.run_config import RunConfig, read_config
from pipedream.runtime.data.reader import Epoch

WORDS = "words.weight"
ADAM = {"name": "AdamW", "args": {"lr": 0.01, "eps": 1e-4}}
MOMENTUM = {"name": "SGD", "args": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}}
PLAIN = {"optimizer": MOMENTUM, "clip_norm": 0.5, "evaluate_every": None}
"""The norm is larger in most updates."""


def case(
    name: str,
    meshes: Sequence[Mesh | None],
    placements: Sequence[str | None],
    replicas: Sequence[int] | None = None,
    **values: str,
) -> Case:
    """`placements`: of the weight that the first and the last stage have."""
    parameters = {
        stage: {WORDS: text}
        for stage, text in zip((0, len(meshes) - 1), placements, strict=False)
        if text
    }
    replicas = replicas or (1,) * len(meshes)
    return Case(name, replicas, meshes, parameters=parameters, values=values)


ROWS = {"input 0": "S(0),R"}
PAIRS = {
    "first": case("first", ((2,), None), ("S(1)", None)),
    "last": case("last", (None, (2,)), (None, "S(0)")),
    "both": case("both", ((2,), (3,)), ("S(1)", "S(0)")),
    "uneven": case("uneven", (None, (5,)), (None, "S(0)")),
    "two axes": case("two axes", ((2,), (2, 2)), ("S(0, chunks=3)", "S(0),R")),
    "partial in the first": case("partial in the first", ((2, 2), None), ("R,S(1)", None), **ROWS),
    "partial in the last": case("partial in the last", (None, (2, 2)), (None, "R,S(0)"), **ROWS),
    "whole": case("whole", ((2,), (2,)), ("R", "S(0)")),
}
REPLICAS = {
    "of the first": case("of the first", ((2,), (2,)), ("S(1)", "S(0)"), (2, 1)),
    "of one device": case("of one device", (None, (2,)), (None, "S(0)"), (2, 1)),
    "and the last": case("and the last", ((2,), None), ("S(0)", None), (1, 2)),
}


@pytest.mark.slow
@pytest.mark.one_in(20)
@pytest.mark.parametrize("name", PAIRS)
def test_as_the_plain_model(tmp_path: Path, name: str) -> None:
    """Losses and weights of a loop without stages, whose two layers have one weight."""
    chosen = replace(PAIRS[name], changes=PLAIN)
    train_cases(tmp_path, "TiedWords", [chosen])
    losses, model = plain(read_config(tmp_path / "run.yaml"))
    assert metrics(tmp_path, chosen) == pytest.approx(losses, rel=1e-12)
    learnt = checkpoint(tmp_path, chosen)
    for parameter, tensor in model.named_parameters():
        torch.testing.assert_close(learnt[parameter], tensor, rtol=1e-12, atol=1e-12)
    assert_copies_equal(tmp_path, chosen)


def plain(config: RunConfig) -> tuple[list[float], nn.Module]:
    torch.manual_seed(config.seed)
    model = sharded_models.TiedWords().double()
    optimizer = torch.optim.SGD(model.parameters(), **config.optimizer.args)
    data, _ = sharded_models.sentences()
    epoch, losses, norms = Epoch(data, config, 1, torch.device("cpu")), [], []
    for first in range(0, len(epoch), config.microbatches):
        numbers = range(first, min(first + config.microbatches, len(epoch)))
        batches = [epoch.batch(number) for number in numbers]
        each = [sharded_models.next_words(model(*b.inputs), b.target) for b in batches]
        torch.stack(each).mean().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm or 0.0).item())
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item() for loss in each]
    assert max(norms) > (config.clip_norm or 0.0)
    return losses, model


def assert_copies_equal(folder: Path, chosen: Case) -> None:
    """Each stage writes its own, and what the optimizer remembers of it: bit for bit the same."""
    path, stages = folder / chosen.name / "checkpoints/latest", len(chosen.replicas)
    for part in (path, path / "optimizer"):
        files = [part / f"model-{stage:05}-of-{stages:05}.safetensors" for stage in (1, stages)]
        first, last = map(load_file, files)
        common = first.keys() & last.keys()
        assert {name.partition("/")[0] for name in common} == {WORDS}
        for name in common:
            assert torch.equal(first[name], last[name]), name


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("schedule", "optimizer"),
    [("flush", ADAM), ("gpipe", MOMENTUM), ("2bw", ADAM), ("2bw", MOMENTUM)],
    ids=["flush, AdamW", "gpipe, SGD", "2bw, AdamW", "2bw, SGD"],
)
def test_schedules_and_replicas(
    tmp_path: Path, schedule: str, optimizer: dict[str, object]
) -> None:
    """Clipped, with a smaller last minibatch and evaluation."""
    data = {"source": "sharded_models:sentences", "args": {"examples": 41}}
    changes = {"optimizer": optimizer, "clip_norm": 0.3, "data": data, "drop_last": False}
    by_replicas: dict[tuple[int, ...], list[Case]] = {}
    for chosen in (PAIRS["both"], PAIRS["partial in the last"], *REPLICAS.values()):
        changed = replace(chosen, schedule=schedule, changes=changes)
        by_replicas.setdefault(tuple(chosen.replicas), []).append(changed)
    for number, cases in enumerate(by_replicas.values()):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert_alike(folder, "TiedWords", cases)
        for chosen in cases:
            assert_copies_equal(folder, chosen)


@pytest.mark.thorough
def test_copies_stay_equal_in_single_precision(tmp_path: Path) -> None:
    """Over 27 updates of parts whose sizes are no multiples of a vector's."""
    changes = {"optimizer": MOMENTUM, "dtype": "float32", "epochs": 3, "microbatches": 1}
    odd = case("odd", ((5,), None), ("S(1)", None))
    cases = [replace(each, changes=changes) for each in (odd, PAIRS["both"], PAIRS["uneven"])]
    train_cases(tmp_path, "TiedWords", cases)
    for chosen in cases:
        assert_copies_equal(tmp_path, chosen)


@pytest.mark.thorough
def test_three_stages(tmp_path: Path) -> None:
    """The one between them, which is on a mesh too, does not have the weight."""
    three = case("three", (None, (2,), (2,)), (None, "S(0)"))
    recomputing = replace(three, name="recomputing", recompute=(0, 1))
    changes = {"optimizer": MOMENTUM, "clip_norm": 0.3}
    cases = [replace(each, changes=changes) for each in (three, recomputing)]
    for number, chosen in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert_alike(folder, "TiedWords", [chosen])


@pytest.mark.thorough
def test_a_run_goes_on_with_other_meshes(tmp_path: Path) -> None:
    """From one mesh to two others to none to one stage that has the weight twice."""
    changes = {"optimizer": ADAM, "clip_norm": 0.3, "evaluate_every": None}
    order = [
        PAIRS["first"],
        PAIRS["two axes"],
        alone(PAIRS["both"]),
        case("one", ((2,),), ("S(0)",)),
        PAIRS["both"],
    ]
    whole = captured("TiedWords")
    kept = [replace(each, name="run", changes=changes) for each in order]
    jobs = [
        job_of(tmp_path, "TiedWords", each, whole, epochs=epochs, resume=epochs > 1)
        for epochs, each in enumerate(kept, start=1)
    ]
    straight = alone(replace(kept[0], changes=changes | {"epochs": len(order)}))
    run_jobs([*jobs, job_of(tmp_path, "TiedWords", straight, whole)])
    expected = checkpoint(tmp_path, straight)
    torch.testing.assert_close(checkpoint(tmp_path, kept[0]), expected, rtol=1e-12, atol=1e-12)
    assert metrics(tmp_path, kept[0]) == pytest.approx(metrics(tmp_path, straight), rel=1e-12)


@pytest.mark.thorough
def test_twice_within_a_stage(tmp_path: Path) -> None:
    """One stage has embedding and head, on a mesh of one and of two axes; clipped."""
    changes = {"optimizer": MOMENTUM, "clip_norm": 0.3}
    cases = [
        case("rows", ((2,),), ("S(0)",)),
        case("columns", ((3,),), ("S(1)",)),
        case("two axes", ((2, 2),), ("S(0),S(1)",)),
        case("partial", ((2, 2),), ("R,S(0)",), **ROWS),
        case("whole", ((2,),), ("R",)),
    ]
    assert_alike(tmp_path, "TiedWords", [replace(each, changes=changes) for each in cases])


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["first", "both"])
def test_frozen(tmp_path: Path, name: str) -> None:
    """What nobody learns stays as it is, weight decay or not."""
    chosen = replace(PAIRS[name], changes={"optimizer": MOMENTUM, "clip_norm": 0.3})
    assert_alike(tmp_path, "FrozenWords", [chosen])
    torch.manual_seed(3)
    expected = sharded_models.FrozenWords().double().words.weight
    assert torch.equal(checkpoint(tmp_path, chosen)[WORDS], expected)


@pytest.mark.thorough
def test_both_on_one_team(tmp_path: Path) -> None:
    """The first and the last of the four stages of a V, with halves of backward passes."""
    changes = {"optimizer": MOMENTUM, "clip_norm": 0.3, "evaluate_every": None}
    vee = replace(case("vee", ((2,), (2,), (2,), (2,)), ("S(1)", "S(0)")), changes=changes)
    whole, reference = captured("TiedWords"), alone(vee)
    job = job_of(tmp_path, "TiedWords", vee, whole)
    data = job.plan.model_dump(exclude_none=True) | {"order": "zb-v"}
    for stage, ranks in zip(data["stages"], ((0, 1), (2, 3), (2, 3), (0, 1)), strict=True):
        stage["ranks"] = ranks
    run_jobs(
        [
            job_of(tmp_path, "TiedWords", reference, whole),
            replace(job, plan=Plan.model_validate(data)),
        ]
    )
    torch.testing.assert_close(
        checkpoint(tmp_path, vee), checkpoint(tmp_path, reference), rtol=1e-12, atol=1e-12
    )
    assert metrics(tmp_path, vee) == pytest.approx(metrics(tmp_path, reference), rel=1e-12)
    assert_copies_equal(tmp_path, vee)
