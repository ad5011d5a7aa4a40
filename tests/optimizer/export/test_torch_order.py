"""Orders of passes as torch.distributed.pipelining reads them, loaded by its own validator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from plans import make_plan

from pipedream.graph.choices import ScheduleName
from pipedream.graph.errors import UserError
from pipedream.graph.plan import OrderTimes, Plan
from pipedream.optimizer.export.torch_order import torch_order
from pipedream.schedule.orders.literature import loop, vee

Ranks = Sequence[Sequence[int]]
MakePlan = Callable[..., Plan]

MAPS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "1f1b": lambda places: tuple(range(places)),
    "interleaved": lambda places: loop(places, 2),
    "zb-h1": lambda places: tuple(range(places)),
    "zb-h2": lambda places: tuple(range(places)),
    "zb-v": lambda places: vee(places, 2),
    "v-half": lambda places: vee(places, 2),
    "v-min": lambda places: vee(places, 2),
    "auto": lambda places: vee(places, 2),
}


@pytest.fixture
def planned(make_graph: Any) -> MakePlan:
    """planned(order, ranks, microbatches): each stage is a node, and reads from the one before."""

    def make(
        order: str | None,
        ranks: Ranks,
        microbatches: int | None,
        schedule: ScheduleName = "flush",
        edges: str = "",
        times: OrderTimes | None = None,
    ) -> Plan:
        nodes = "abcdefgh"[: len(ranks)]
        chain = " ".join(map("-".join, pairwise(nodes)))
        graph = make_graph(" ".join(nodes), f"{chain} {edges}".strip())
        data = make_plan(graph, list(nodes), [len(own) for own in ranks], schedule).model_dump()
        for stage, own in zip(data["stages"], ranks, strict=True):
            stage |= {"ranks": tuple(own)}
        data["predicted"]["microbatches"] = microbatches
        return Plan.model_validate(data | {"order": order, "order_times": times})

    return make


def alone(rank_map: Sequence[int]) -> Ranks:
    return [[place] for place in rank_map]


@pytest.mark.parametrize(
    ("order", "rank_map", "schedule", "microbatches", "rows"),
    [
        (None, (0, 1), "flush", 3, "0F0,0F1,0B0,0F2,0B1,0B2 1F0,1B0,1F1,1B1,1F2,1B2"),
        (None, (0, 1), "gpipe", 2, "0F0,0F1,0B1,0B0 1F0,1F1,1B1,1B0"),
        ("zb-h1", (0, 1), "flush", 2, "0F0,0F1,0B0,0B1 1F0,1I0,1F1,1I1,1W0,1W1"),
        (
            "interleaved",
            (0, 1, 0, 1),
            "flush",
            2,
            "0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1 1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1",
        ),
        (
            "zb-v",
            (0, 1, 1, 0),
            "flush",
            1,
            "0F0,3F0,3I0,3W0,0B0 1F0,2F0,2I0,1I0,2W0,1W0",
        ),
    ],
)
def test_a_row_for_each_rank_and_a_cell_for_each_pass(
    planned: MakePlan,
    order: str | None,
    rank_map: tuple[int, ...],
    schedule: ScheduleName,
    microbatches: int,
    rows: str,
) -> None:
    made = torch_order(planned(order, alone(rank_map), microbatches, schedule))
    assert made.csv.splitlines() == rows.split()
    assert (made.microbatches, made.stage_ranks) == (microbatches, rank_map)


def test_replicas_share_the_order_of_one_pipeline(planned: MakePlan) -> None:
    one = torch_order(planned("zb-v", alone((0, 1, 1, 0)), 4))
    two = torch_order(planned("zb-v", [[0, 1], [2, 3], [2, 3], [0, 1]], 8))
    assert two == one


def test_the_order_that_is_found_is_that_of_the_plans_times(planned: MakePlan) -> None:
    """Where a rank has room for one microbatch alone, its backward pass comes next."""
    ones = (1.0, 1.0)
    times = OrderTimes(
        forward=ones,
        backward_input=ones,
        backward_weight=ones,
        held_bytes=ones,
        kept_bytes=ones,
    )
    wide, narrow = (
        torch_order(planned("auto", [[0], [1]], 4, times=times.model_copy(update=limit)))
        for limit in ({}, {"limit_bytes": 1.0})
    )
    assert wide.csv.startswith("0F0,0F1")
    assert narrow.csv.startswith("0F0,0B0,0F1")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("places", [2, 3, 4])
@pytest.mark.parametrize("order", MAPS)
def test_torch_loads_every_order(
    planned: MakePlan, tmp_path: Path, order: str, places: int
) -> None:
    """Its loader checks that all passes are there, and adds messages; its simulation ends. It takes
    the losses to be computed in the order of the microbatches.
    """
    rank_map = MAPS[order](places)
    for microbatches in (1, 2, 3, places, 2 * places + 1):
        made = torch_order(planned(order, alone(rank_map), microbatches))
        loaded = load(made.csv, tmp_path / "order.csv", rank_map, microbatches)
        assert loaded.stage_index_to_group_rank == dict(enumerate(rank_map))
        assert len(simulated(loaded)) == places
        last = [
            cell
            for cell in made.csv.replace("\n", ",").split(",")
            if f"{len(rank_map) - 1}F" in cell
        ]
        assert last == [f"{len(rank_map) - 1}F{b}" for b in range(microbatches)]


def load(text: str, path: Path, rank_map: Sequence[int], microbatches: int) -> Any:
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    path.write_text(text)
    stage = SimpleNamespace(num_stages=len(rank_map), group_size=max(rank_map) + 1, group_rank=0)
    runtime = _PipelineScheduleRuntime([stage], microbatches)
    runtime._load_csv(str(path), format="compute_only")
    return runtime


def simulated(runtime: Any) -> Any:
    """The passes and messages, each when what it waits for is there; it knows no other actions."""
    for rank, actions in runtime.pipeline_order_with_comms.items():
        kept = [each for each in actions if each.microbatch_index is not None]
        runtime.pipeline_order_with_comms[rank] = kept
    return runtime._simulate()


@pytest.mark.parametrize(
    ("order", "ranks", "changes", "says"),
    [
        (None, [[0], [1]], {"schedule": "weight-stashing"}, "this schedule is weight-stashing"),
        (None, [[0], [1]], {"schedule": "2bw"}, "this schedule is 2bw"),
        (None, [[0, 1], [2]], {}, "torch has as many replicas of every stage"),
        (None, [[0, 1], [2, 3]], {"microbatches": 3}, "as many microbatches on each replica"),
        (None, [[0], [1]], {"microbatches": None}, "as many microbatches on each replica"),
        (None, [[0], [1], [2]], {"edges": "a-c"}, "stage 2 reads from stage 0"),
        ("zigzag", [[0], [1]], {}, "order zigzag is not known: 1f1b, "),
        ("zb-v", [[0], [1]], {}, "order zb-v is for 2 stages on each rank"),
        ("zb-h1", [[0], [1]], {"schedule": "gpipe"}, "order zb-h1 is for schedule flush"),
    ],
)
def test_what_torch_cannot_run_is_refused(
    planned: MakePlan, order: str | None, ranks: Ranks, changes: dict[str, Any], says: str
) -> None:
    plan = planned(order, ranks, **{"microbatches": 4, **changes})
    with pytest.raises(UserError) as refused:
        torch_order(plan)
    assert says in refused.value.format_message()
    assert "\n" not in refused.value.format_message()
