"""What devices send is what those at the other end expect, and completes what these hold."""

from __future__ import annotations

from itertools import product

import pytest
from sharded_runs import Case, captured, sharded_plan

from pipedream.graph.placements.placement import Mesh, device_count
from pipedream.graph.plan import Plan
from pipedream.runtime.engine.value_exchange import DeviceMessages
from pipedream.runtime.stages.crossings import Crossings, crossings
from pipedream.runtime.stages.partition import interfaces
from pipedream.schedule.action import Action, Kind

BATCH: dict[Mesh | None, str | None] = {
    None: None,
    (2,): "S(0)",
    (3,): "S(1)",
    (2, 2): "S(0),R",
}
"""By mesh how the second of two stages may take its input."""
TO_LAST = Action(Kind.SEND_ACTIVATION, 0, 0, 0, 0, peer=(1, 0))
FROM_FIRST = Action(Kind.RECV_ACTIVATION, 1, 0, 0, 0, peer=(0, 0))
TO_FIRST = Action(Kind.SEND_GRADIENT, 1, 0, 0, 0, peer=(0, 0))
FROM_LAST = Action(Kind.RECV_GRADIENT, 0, 0, 0, 0, peer=(1, 0))


def both_ends(case: Case, taken: str | None) -> list[Crossings]:
    """Of two stages of a perceptron."""
    whole = captured("Perceptron")
    data = sharded_plan("Perceptron", case, whole).model_dump(exclude_none=True)
    if taken is not None:
        data["stages"][1]["placements"]["values"] = {"input 0": taken}
    plan = Plan.model_validate(data)
    every = interfaces(whole, plan)
    return [crossings(whole, plan, every, stage) for stage in (0, 1)]


@pytest.mark.slow
@pytest.mark.one_in(4)
@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize(("one", "other"), [*product(BATCH, BATCH)])
def test_both_ends_agree(one: Mesh | None, other: Mesh | None, slow: bool, divided: bool) -> None:
    counts = device_count(one or ()), device_count(other or ())
    machines = (1, sum(counts)) if slow else ()
    case = Case("run", (1, 1), (one, other), machines=machines)
    ends = both_ends(case, BATCH[other] if divided else None)
    for send, receive in ((TO_LAST, FROM_FIRST), (TO_FIRST, FROM_LAST)):
        senders, receivers = (
            [
                DeviceMessages.of(action, ends[action.stage], device, own, others)
                for own, others in [(counts[action.stage], counts[1 - action.stage])]
                for device in range(own)
            ]
            for action in (send, receive)
        )
        for a, b in product(range(len(senders)), range(len(receivers))):
            assert senders[a].parts.get(b) == receivers[b].parts.get(a)
        for device, messages in enumerate(receivers):
            assert messages.parts, "each device waits for another"
            for number, held in enumerate(messages.regions):
                sent = [p for parts in messages.parts.values() for p in parts if p.number == number]
                gathered = [t for t in messages.gathers[number] if t.target == device]
                assert sum(each.region.size for each in (*sent, *gathered)) == held.size


def messages_of(case: Case, taken: str | None, device: int) -> DeviceMessages:
    """What a device of the last stage receives."""
    return DeviceMessages.of(FROM_FIRST, both_ends(case, taken)[1], device, 2, 2)


def test_the_rest_is_gathered_where_that_is_faster() -> None:
    pair: tuple[Mesh, ...] = ((2,), (2,))
    near, apart = (Case("run", (1, 1), pair, machines=each) for each in ((4,), (2, 2)))
    direct, shared = (messages_of(case, None, 1) for case in (near, apart))
    assert direct.is_direct
    assert not shared.is_direct
    ((part,),) = shared.parts.values()
    assert 2 * part.region.size == shared.regions[0].size


def test_what_both_stages_divide_alike_crosses_in_parts() -> None:
    pair: tuple[Mesh, ...] = ((2,), (2,))
    case = Case("run", (1, 1), pair)
    first, last = both_ends(case, "S(0)")
    assert first.sent == last.received
    assert messages_of(case, "S(0)", 1).is_direct
    assert list(messages_of(case, "S(0)", 1).parts) == [1]
    uneven = Case("run", (1, 1), ((3,), (2,)))
    first, last = both_ends(uneven, "S(0)")
    assert first.sent != last.received, "meshes differ: it leaves whole"
