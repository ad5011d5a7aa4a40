"""Degrees of parallelism of plans whose stages are on meshes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from plans import make_plan

from pipedream.graph.errors import UserError
from pipedream.graph.placements.requests import PlacementTexts
from pipedream.graph.plan import Plan
from pipedream.optimizer.export.degrees import Degrees, degrees

Stages = Sequence[tuple[tuple[int, ...] | None, int, Mapping[str, str]]]


@pytest.fixture
def planned(make_graph):
    """planned([(mesh, replicas, placements), ...]): a plan of such stages."""

    def make(stages: Stages) -> Plan:
        names = [f"n{stage}" for stage in range(len(stages))]
        edges = " ".join(f"n{k}-n{k + 1}" for k in range(len(stages) - 1))
        workers = [1 if mesh is None else _product(mesh) for mesh, _, _ in stages]
        counts = [each * r for each, (_, r, _) in zip(workers, stages, strict=True)]
        plan = make_plan(make_graph(" ".join(names), edges), [[n] for n in names], counts)
        changed = tuple(
            stage.model_copy(
                update={
                    "mesh": mesh,
                    "placements": None if mesh is None else PlacementTexts(parameters=dict(placed)),
                }
            )
            for stage, (mesh, _, placed) in zip(plan.stages, stages, strict=True)
        )
        return plan.model_copy(update={"stages": changed})

    return make


def _product(mesh: tuple[int, ...]) -> int:
    devices = 1
    for size in mesh:
        devices *= size
    return devices


def test_axes_that_divide_parameters_are_tensor_parallel_and_others_data_parallel(planned) -> None:
    plan = planned([((2, 3), 2, {"a": "R,R"}), ((2, 3), 2, {"b": "R,S(0)", "c": "R,S(1)"})])
    assert degrees(plan, 2) == Degrees(pipeline=2, tensor=3, data=2 * 2)
    assert degrees(plan, 2).processes == 24
    both = planned([((2, 3), 1, {"a": "S(0),R", "b": "R,S(0)"})])
    assert degrees(both, 1) == Degrees(1, 6, 1)
    whole = planned([((2, 3), 1, {"a": "R,R"})])
    assert degrees(whole, 1) == Degrees(1, 1, 6)


def test_plans_without_meshes_have_none(planned) -> None:
    assert degrees(planned([(None, 2, {}), (None, 1, {})]), 2) is None


def test_replicas_that_differ_leave_the_data_degree_open(planned) -> None:
    plan = planned([((2,), 2, {"a": "S(0)"}), ((2,), 1, {"b": "S(0)"})])
    found = degrees(plan, 2)
    assert found == Degrees(2, 2, None)
    assert found.processes is None


@pytest.mark.parametrize(
    ("second", "told"),
    [(((2,), 1, {"b": "S(0)"}), "meshes of 4, 2"), ((None, 1, {}), "meshes of 4, 1")],
)
def test_stages_of_different_meshes_are_refused(planned, second, told) -> None:
    plan = planned([((4,), 1, {"a": "S(0)"}), second])
    with pytest.raises(UserError, match="it divides all stages alike") as raised:
        degrees(plan, 2)
    assert all(
        mesh in str(raised.value.message) for mesh in told.removeprefix("meshes of ").split(", ")
    )
