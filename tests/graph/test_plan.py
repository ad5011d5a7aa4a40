"""plan.json: round trip, and what is said of a plan that cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from whole_files import plan_json

from pipedream.graph.errors import UserError
from pipedream.graph.plan import Plan, moved, read_plan, write_plan


def test_a_plan_written_and_read_is_the_same_plan(tmp_path: Path) -> None:
    plan = Plan.model_validate(plan_json())
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan
    assert json.loads((tmp_path / "plan.json").read_text()) == plan_json()


def test_a_plan_of_before_there_was_recomputation_is_read() -> None:
    data = plan_json()
    del data["optimizer"]
    for stage in data["stages"]:
        del stage["memory"], stage["recompute"]
    plan = Plan.model_validate(data)
    assert [(stage.memory, stage.recompute) for stage in plan.stages] == [(None, False)] * 2


def test_the_items_of_memory_add_up() -> None:
    memory = Plan.model_validate(plan_json()).stages[0].memory
    assert memory is not None
    assert memory.total == 64.0


def test_what_a_plan_knows() -> None:
    plan = Plan.model_validate(plan_json())
    assert plan.workers == 3
    assert plan.replicas == (2, 1)
    assert plan.stage_of == {"a": 0, "b": 0, "c": 1, "d": 1}


def test_where_devices_stay_unused_the_processes_close_up() -> None:
    data = plan_json()
    data["stages"][0]["ranks"], data["stages"][1]["ranks"] = [3, 0], [2]
    assert Plan.model_validate(data).rank_assignment == ((((2,),), ((0,),)), (((1,),),))


def swap_stages(data: dict[str, Any]) -> None:
    first, second = data["stages"]
    first["nodes"], second["nodes"] = second["nodes"], first["nodes"]


WRONG: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("format", lambda d: d.pop("format"), "1: format: is missing"),
    (
        "format",
        lambda d: d.update(format="plan/9"),
        "format: 'plan/9' is not one of the choices: write 'pipedream-plan/1'",
    ),
    ("schedule", lambda d: d.update(schedule="random"), "schedule: "),
    ("no stages", lambda d: d.update(stages=[]), "stages: "),
    ("missing", lambda d: d.pop("cluster"), "cluster: is missing"),
    ("extra", lambda d: d.update(stagez=[]), "stagez: unknown field"),
    ("position", lambda d: d["stages"].reverse(), "stage 1 stands at position 0"),
    ("stranger", lambda d: d["stages"][0]["nodes"].append("z"), "stage 0 names node z"),
    ("twice", lambda d: d["stages"][1]["nodes"].append("a"), "node a is in stages 0 and 1"),
    ("homeless", lambda d: d["stages"][1]["nodes"].remove("d"), "node d is in no stage"),
    ("backwards", swap_stages, "a feeds b but is in a later stage|a feeds c"),
    ("no nodes", lambda d: d["stages"][0].update(nodes=[]), "stages.0.nodes: "),
    ("no ranks", lambda d: d["stages"][0].update(ranks=[]), "stages.0.ranks: "),
    (
        "two stages",
        lambda d: d["stages"][1].update(ranks=[1]),
        "rank 1 is in stages 0 and 1: order 1f1b runs one stage on each rank",
    ),
    ("rank twice", lambda d: d["stages"][1].update(ranks=[2, 2]), "stage 1 names rank 2 twice"),
    ("no such rank", lambda d: d["stages"][1].update(ranks=[4]), "rank 4: the cluster has 4 dev"),
    ("below", lambda d: d["stages"][1].update(ranks=[-1]), "rank -1: the cluster has 4 devices"),
    ("crowd", lambda d: d["cluster"].update(machines=[2, 1]), "rank 2: the cluster has 2 devices"),
    ("negative", lambda d: d["stages"][0].update(compute_seconds=-1), "stages.0.compute_seconds"),
    ("nan", lambda d: d["predicted"].update(seconds_per_minibatch=float("nan")), "predicted.sec"),
    ("infinite", lambda d: d["stages"][1].update(memory_bytes=float("inf")), "memory_bytes"),
    ("cluster", lambda d: d["cluster"].update(bandwidth=[1.0]), "cluster: 2 levels of machines"),
    ("id twice", lambda d: d["graph"]["nodes"].append(d["graph"]["nodes"][0]), "a is there twice"),
    ("order", lambda d: d["graph"]["nodes"].reverse(), "b feeds d but does not come before it"),
    ("misspelt", lambda d: d.update(clusters=d.pop("cluster")), "clusters: unknown field; did you"),
    ("two", lambda d: [d.pop("cluster"), d.pop("graph")], "is missing .and 1 more."),
]


def test_a_folder_instead_of_the_plan_in_it(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(UserError, match=r"is a folder; did you mean .*/plan\.json\?"):
        read_plan(tmp_path)


@pytest.mark.parametrize(("name", "spoil", "says"), WRONG, ids=[case[0] for case in WRONG])
def test_an_impossible_plan_is_refused_in_one_line(
    tmp_path: Path, name: str, spoil: Callable[[dict[str, Any]], Any], says: str
) -> None:
    data = plan_json()
    spoil(data)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match=says) as caught:
        read_plan(path)
    assert caught.value.format_message().startswith(f"{path}:")
    assert "\n" not in caught.value.format_message()


def test_the_ranks_of_a_team_are_in_the_same_stages() -> None:
    """Else their lists of actions differ, and they wait for each other."""
    data = plan_json()
    first, *others = data["stages"]
    ranks = [rank for stage in data["stages"] for rank in stage["ranks"]]
    shared = {"mesh": (2,), "ranks": ranks[:2]}
    again = {"mesh": (2,), "ranks": [ranks[0], ranks[-1]]}
    data |= {"order": "interleaved", "stages": [first | shared, others[0] | again, *others[1:]]}
    with pytest.raises(ValidationError, match="not all of them are in the same other stages"):
        Plan.model_validate(data)


def test_in_another_folder_there_is_another_way_to_the_profile(tmp_path: Path) -> None:
    plan = Plan.model_validate(plan_json() | {"asked": {"profile": "../profile.json"}})
    there = moved(plan, tmp_path / "plan", tmp_path / "runs/first")
    assert there.asked is not None
    assert there.asked.profile == "../../profile.json"
    assert moved(there, tmp_path / "runs/first", tmp_path / "plan") == plan
    without = Plan.model_validate(plan_json() | {"asked": {}})
    assert moved(without, tmp_path / "plan", tmp_path) == without


def broken_stage(**fields: object) -> dict[str, object]:
    plan = plan_json()
    plan["stages"][0] |= {"recompute": False, **fields}
    return plan


@pytest.mark.parametrize(
    ("fields", "whole", "reason"),
    [
        ({"recompute": ["c"]}, {}, "recomputes node c, not one of its own"),
        ({"offload": True, "mesh": [2]}, {}, "on a mesh"),
        ({"recompute": ["a"]}, {"order": "zb-h1"}, "order zb-h1 divides"),
        ({"offload": True}, {"order": "zb-h1"}, "order zb-h1 divides"),
        ({"offload": True, "recompute": True}, {}, "choose one"),
    ],
)
def test_single_nodes_and_offload_are_refused_where_they_cannot_be(
    fields: dict[str, object], whole: dict[str, object], reason: str
) -> None:
    with pytest.raises(ValidationError, match=reason):
        Plan.model_validate(broken_stage(**fields) | whole)


def test_a_list_of_nodes_is_read_as_it_is_written(tmp_path: Path) -> None:
    plan = Plan.model_validate(broken_stage(recompute=["b"], offload=False))
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json").stages[0].recomputed_nodes == ("b",)
