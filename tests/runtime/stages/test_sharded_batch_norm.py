"""pd-train with minibatches that devices divide: batch norms add up sums for each channel, and what
is learned is what one device learns.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_results import assert_alike
from sharded_runs import MODELS, Case, captured, sharded_plan
from torch.nn.functional import cross_entropy

from pipedream.capture.programs.loss_end import Target
from pipedream.graph.placements.placement import Partial, Replicate
from pipedream.runtime.stages import planned_passes
from pipedream.runtime.stages.planned_passes import PlannedPasses
from pipedream.runtime.stages.stage_module import StageModule
from pipedream.sharding.assignment import Assignment, redistributions
from pipedream.sharding.propagate import propagate

SLOW = {"name": "SGD", "args": {"lr": 0.001, "momentum": 0.9}}
"""With larger steps a narrow ResNet is chaotic: differences in the last digit grow."""
CHANGES = {"batch_size": 8, "microbatches": 2, "optimizer": SLOW}
TWO = Case("two", values={"input 0": "S(0)"}, changes=CHANGES)
SQUARE = Case("two by two", meshes=((2, 2),), values={"input 0": "S(0),R"}, changes=CHANGES)
ROWS = Case("rows of pictures", values={"input 0": "S(2)"}, changes=CHANGES)
ALL = Case("all four", meshes=((2, 2),), values={"input 0": "S(0),S(2)"}, changes=CHANGES)


def assigned(model: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> Assignment:
    """How the devices of the plan divide the passes of a run's minibatches."""
    whole = captured(model, torch.float64)
    plan = sharded_plan(model, case, whole)
    seen: list[Assignment] = []

    def noted(*given: Any) -> Assignment:
        seen.append(propagate(*given))
        return seen[-1]

    monkeypatch.setattr(planned_passes, "propagate", noted)
    module = StageModule.of(whole, plan, 0)
    names = frozenset(name for name, _ in module.piece.module.named_parameters())
    module.program.planned = PlannedPasses.of(plan, 0, 0, names)
    module.end_in(cross_entropy)
    images = torch.randn(8, *MODELS[model][0], dtype=torch.float64)
    parameters, values = module.piece.module.named_parameters(), {whole.inputs[0]: images}
    target = Target.of(torch.zeros(8, dtype=torch.int64))
    module.program.on_mesh(dict(parameters), values, target)
    return seen[-1]


def pictures_moved(assignment: Assignment) -> list[str]:
    """The values of more than one place, other than weights, that move on the first axis."""
    graph = assignment.graph
    weights = {each.value for each in graph.inputs if each.role == "parameter"}
    weights |= {each.value for each in graph.outputs if each.role == "parameter gradient"}
    types = graph.types().items()
    pictures = {name for name, type_ in types if type_.shape[2:] not in ((), (1, 1))} - weights
    return [
        each.value
        for each in redistributions(assignment)
        if each.value in pictures and any(step.axis == 0 and step.bytes for step in each.steps)
    ]


@pytest.mark.slow
@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", [TWO, SQUARE], ids=lambda case: case.name)
@pytest.mark.parametrize(("model", "norms"), [("Convolutions", 3), ("large_resnet18", 20)])
def test_no_picture_is_gathered(
    monkeypatch: pytest.MonkeyPatch, model: str, norms: int, case: Case
) -> None:
    """Of each batch norm three small sums are: of elements, of squares, and of gradients."""
    assignment = assigned(model, case, monkeypatch)
    assert pictures_moved(assignment) == []
    names = {call.name: call.operator for call in assignment.graph.calls}
    sums = [each for each in redistributions(assignment) if each.value in names]
    sums = [each for each in sums if "batch_norm" in names[each.value].target]
    assert [each.source[0] for each in sums] == [Partial()] * 3 * norms
    assert [each.target[0] for each in sums] == [Replicate()] * 3 * norms
    largest = max(step.bytes for each in sums for step in each.steps)
    assert largest <= 2 * 64 * 8, "two numbers for each of 64 channels"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "cases", "changes"),
    [
        ("Convolutions", [TWO, SQUARE, ROWS, ALL], {}),
        ("large_resnet18", [TWO, SQUARE], {"evaluate_every": None}),
    ],
)
def test_divided_minibatches(
    tmp_path: Path, model: str, cases: list[Case], changes: dict[str, object]
) -> None:
    """Running statistics and the loss in evaluation too."""
    assert_alike(tmp_path, model, [replace(e, changes=CHANGES | changes) for e in cases])


@pytest.mark.thorough
def test_uneven_minibatches(tmp_path: Path) -> None:
    """Five examples on two devices, and three in the last minibatch."""
    data = {"source": "sharded_models:images", "args": {"size": 12, "examples": 44}}
    changes = CHANGES | {"batch_size": 5, "drop_last": False, "data": data}
    cases = [replace(each, changes=changes) for each in (TWO, SQUARE)]
    assert_alike(tmp_path, "Convolutions", cases)


@pytest.mark.thorough
def test_recomputation_and_stages(tmp_path: Path) -> None:
    """Statistics are updated once, in the first of two stages too, which is recomputed."""
    meshes = ((2,), (2,))
    case = replace(TWO, replicas=(1, 1), meshes=meshes, recompute=(0,))
    assert_alike(tmp_path, "Convolutions", [case])


@pytest.mark.thorough
def test_autocast(tmp_path: Path) -> None:
    """bfloat16 has eight bits: sums in another order differ by some thousandths."""
    changes = CHANGES | {"dtype": "float32", "autocast": "bfloat16", "evaluate_every": None}
    assert_alike(tmp_path, "Convolutions", [replace(TWO, changes=changes)], tolerance=0.01)
