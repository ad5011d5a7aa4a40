"""Each order against its diagram, the checker, and what its paper says of it."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from charts import held_bytes, timed
from drawn_orders import drawn, flush_of
from pipelines import Orders, of_rounds

from pipedream.graph.choices import DEFAULT_ORDER, ORDER_NAMES
from pipedream.schedule.checker import check_ranks
from pipedream.schedule.orders.literature import loop, vee
from pipedream.schedule.orders.named import ROUND_ORDERS, round_of
from pipedream.schedule.orders.passes import Round, seconds_of
from pipedream.schedule.schedule import Schedule
from pipedream.schedule.spec import PassTimes, PipelineSpec

DIAGRAMS = re.split(r"\n\n", Path(__file__).with_name("diagrams.txt").read_text().strip())[1:]

EVERY = [
    (name, stages_each)
    for name, each in ROUND_ORDERS.items()
    for stages_each in each.stages_each
    if name != "auto"
]


@pytest.mark.parametrize("diagram", DIAGRAMS, ids=lambda text: text.partition("\n")[0])
def test_diagram(diagram: str) -> None:
    title, _, rows = diagram.partition("\n")
    name, *numbers = title.split()
    assert drawn(flush_of(name, *map(int, numbers))) == rows


def test_the_names_that_options_offer_are_those_of_the_orders() -> None:
    assert set(ORDER_NAMES) == {DEFAULT_ORDER, *ROUND_ORDERS}


def checked(orders: Orders) -> None:
    check_ranks(orders.schedule, orders.actions, orders.assignment)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("places", range(1, 7))
@pytest.mark.parametrize(("name", "stages_each"), EVERY)
def test_sound_for_any_number_of_microbatches(name: str, stages_each: int, places: int) -> None:
    """Fewer than places included, and a last round that is smaller."""
    rank_map = (ROUND_ORDERS[name].maps or (loop,))[0](places, stages_each)
    for microbatches in range(1, 13):
        checked(of_rounds(name, rank_map, microbatches + microbatches // 2, microbatches))


@pytest.mark.parametrize(("name", "stages_each"), EVERY)
def test_sound_with_links_that_skip_stages_and_with_replicas(name: str, stages_each: int) -> None:
    """Of two replicas each has every other minibatch, in rounds that do not divide by them."""
    rank_map = (ROUND_ORDERS[name].maps or (loop,))[0](3, stages_each)
    stages = len(rank_map)
    links = [(s, t) for s in range(stages) for t in (s + 1, s + 2, stages - 1) if s < t < stages]
    checked(of_rounds(name, rank_map, 12, 5, sorted(set(links)), replicas=2))


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize(("name", "stages_each"), EVERY)
def test_sound_where_replicas_have_no_minibatch_in_a_round(
    name: str, stages_each: int, replicas: int
) -> None:
    """One closed its rounds at once, stage after stage, and another in the order of its passes:
    they waited for each other.
    """
    for places in (1, 2, 3):
        rank_map = (ROUND_ORDERS[name].maps or (loop,))[0](places, stages_each)
        for microbatches in range(1, 2 * replicas):
            minibatches = 2 * microbatches + 1
            checked(of_rounds(name, rank_map, minibatches, microbatches, replicas=replicas))


@pytest.mark.parametrize(("name", "stages_each"), EVERY)
def test_sound_with_stages_that_share_a_parameter(name: str, stages_each: int) -> None:
    """On one rank or several, with a norm of the whole model and without."""
    rank_map = (ROUND_ORDERS[name].maps or (loop,))[0](2, stages_each)
    for tied in combinations(range(len(rank_map)), 2):
        for joint_norm in (True, False):
            orders = of_rounds(name, rank_map, 7, 3, replicas=2)
            spec = replace(orders.schedule.spec, tied=tied, joint_norm=joint_norm)
            checked(Orders.made(Schedule(spec, 7), orders.ranks))


def bubble(spec: PipelineSpec, order: Round) -> float:
    """Of the place that waits longest between its first pass and its last."""
    return max(
        times[-1][1] - times[0][0] - sum(seconds_of(spec.pass_times, each) for each in own)
        for own, times in zip(order, timed(spec, order), strict=True)
    )


def alike(stages: int, forward: float, inputs: float, weights: float) -> PassTimes:
    unit = PassTimes.unit(stages, stages - 1)
    return replace(
        unit,
        forward=(forward,) * stages,
        backward_input=(inputs,) * stages,
        backward_weight=(weights,) * stages,
    )


@pytest.mark.parametrize("seconds", [(1, 1, 1), (1, 1.25, 0.75), (1, 2, 1), (2, 2, 1.5)])
@pytest.mark.parametrize("places", range(2, 7))
def test_bubbles_of_one_stage_on_each_rank(
    places: int, seconds: tuple[float, float, float]
) -> None:
    """Qi et al. 2401.10241, table 2, where the gradients of weights take least."""
    forward, inputs, weights = seconds
    expected = {
        "interleaved": forward + inputs + weights,  # which is 1F1B then
        "zb-h1": forward + inputs - weights,
        "zb-h2": forward + inputs - 2 * weights,
    }
    in_flight = {"interleaved": places, "zb-h1": places, "zb-h2": 2 * places - 1}
    for name, each in expected.items():
        for microbatches in (2 * places, 3 * places + 1):
            times = alike(places, *seconds)
            spec = flush_of(name, places, 1, microbatches, times)
            order = round_of(spec, microbatches)
            assert bubble(spec, order) == pytest.approx((places - 1) * each)
            assert max(held_bytes(order, times)) == in_flight[name]


@pytest.mark.parametrize("stages_each", [2, 3, 4])
@pytest.mark.parametrize("places", range(2, 7))
def test_interleaving_divides_the_bubble(places: int, stages_each: int) -> None:
    """Narayanan et al. 2021, section 2.2: (p - 1) (F + B) of a microbatch on a rank, over v."""
    spec = flush_of("interleaved", places, stages_each, 3 * places)
    order = round_of(spec, 3 * places)
    assert bubble(spec, order) == pytest.approx((places - 1) * 3)
    held = max(held_bytes(order, spec.pass_times))
    assert held == places * stages_each + places - 1


@pytest.mark.parametrize("places", range(2, 9))
def test_activations_and_bubbles_of_the_shape_of_a_v(places: int) -> None:
    """Two stages of a microbatch on a rank are one microbatch of activations: of ZB-V p, of V-Half
    (p + 2) // 2, of V-Min (p + 4) // 3 (Qi et al. 2405.15362).
    """
    most = {"zb-v": places, "v-half": (places + 2) // 2, "v-min": (places + 4) // 3}
    one_f_one_b = 2 * 3 * (places - 1)  # two stages' passes
    bubbles = {}
    for name, microbatches in most.items():
        spec = flush_of(name, places, 2, 4 * places)
        order = round_of(spec, 4 * places)
        assert max(held_bytes(order, spec.pass_times)) == 2 * microbatches
        bubbles[name] = bubble(spec, order)
    assert bubbles["zb-v"] == 0
    assert bubbles["v-half"] <= one_f_one_b / 2 + 1
    assert bubbles["v-min"] <= one_f_one_b


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("zb-h1", {"name": "gpipe"}, "is for schedule flush; this one is gpipe"),
        ("zb-h1", {"replicas": (1, 2, 1, 1)}, "is for stages that have as many replicas each"),
        ("zb-h1", {"rank_map": loop(2, 2)}, "is for 1 stage on each rank"),
        ("interleaved", {"rank_map": vee(2, 2)}, "is for stages that are on the ranks as `loop`"),
        ("zb-v", {"rank_map": loop(2, 2)}, "is for stages that are on the ranks as `vee` says"),
        ("zb-v", {"rank_map": (0, 1, 1, 1)}, "is for 2 stages on each rank"),
        ("zb-v", {"rank_map": vee(2, 2)}, None),
    ],
)
def test_a_pipeline_that_an_order_is_not_for(
    name: str, changes: dict[str, object], says: str | None
) -> None:
    chain = ((0, 1), (1, 2), (2, 3))
    spec = replace(PipelineSpec("flush", (1,) * 4, chain, order=name), **changes)
    misfit = ROUND_ORDERS[name].misfit(spec)
    assert misfit == says if says is None else misfit is not None and misfit.startswith(says)
