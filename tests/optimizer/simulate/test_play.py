"""The compiled player: small cases by hand, and any case against the slow one of `fluid`.

By hand, all links are of 10 bytes per second and a forward pass takes a second.
"""

from itertools import combinations
from unittest.mock import patch

import pytest
from amount import examples
from fluid import fair_rates, fluid_spans
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import B, F, Orders, halved, interleaved, with_norm, zero_bubble
from schedules import schedule

from pipedream.graph.choices import SCHEDULES
from pipedream.graph.cluster import Cluster, DeviceType, Link
from pipedream.optimizer.simulate import play as player
from pipedream.optimizer.simulate import simulator
from pipedream.optimizer.simulate.play import _play
from pipedream.optimizer.simulate.workload import StageWork, Workload
from pipedream.schedule.action import Kind
from pipedream.schedule.checker import check_ranks
from pipedream.schedule.generate import Step
from pipedream.schedule.overlap import LOOK_AHEAD
from pipedream.schedule.policy import uniform_updates
from pipedream.schedule.schedule import Schedule
from pipedream.schedule.spec import PipelineSpec
from pipedream.schedule.steady_state import SteadySpan

FREE = 1e30
SECOND = StageWork(1.0, 1.0)


def simulate(made, workload, cluster, ranks, actions=None):
    span = SteadySpan(made.minibatches, 0, made.minibatches)
    return simulator.simulate(made, workload, cluster, ranks, span, actions)


# By hand ---------------------------------------------------------------------


def play(
    works,
    minibatches,
    forward=(),
    backward=(),
    replicas=None,
    name="weight-stashing",
    joint_norm=False,
    **cluster,
):
    """On ranks in the order of the stages, which have one replica each if not said otherwise.

    `forward` and `backward`: bytes along each link.
    """
    replicas = replicas or (1,) * len(works)
    numbers = iter(range(sum(replicas)))
    ranks = [[next(numbers) for _ in range(count)] for count in replicas]
    nothing = dict.fromkeys([*forward, *backward], 0.0)
    workload = Workload(tuple(works), nothing | dict(forward), nothing | dict(backward))
    made = schedule(name, replicas, nothing, minibatches, minibatches, joint_norm=joint_norm)
    return simulate(made, workload, ten_per_second(sum(replicas), **cluster), ranks)


def ten_per_second(devices, **fields):
    return Cluster(**{"machines": (devices,), "bandwidth": (10.0,), **fields})


def spans(found, rank, kind):
    return [(e.begin, e.end) for e in found.events[rank] if e.action.kind is kind]


def received(found, rank, kind=Kind.RECV_ACTIVATION):
    """When the messages have been received, in seconds."""
    return pytest.approx([end for _, end in spans(found, rank, kind)])


def test_two_streams_into_one_port_get_half_each_until_the_shorter_ends():
    #         0   1   2   3   4   5
    # 0 to 2      5   5               10 bytes
    # 1 to 2      5   5   10  10      30 bytes
    found = play([SECOND] * 3, 1, {(0, 2): 10.0, (1, 2): 30.0})
    assert received(found, 2) == [3, 5]


def test_a_stream_has_what_the_others_of_its_port_cannot_use():
    # Out of 0 go three streams, each with a third of its port, one of them to 4. That leaves two
    # thirds of the port of 4 to the stream from 1, which would get one half if ports were divided.
    ways = {(0, 2): 10.0, (0, 3): 10.0, (0, 4): 10.0, (1, 4): 20.0}
    found = play([SECOND] * 5, 1, ways)
    assert received(found, 2) == [4]
    assert received(found, 4) == [4, 4]


def test_the_kernels_are_compiled_for_one_layout_of_arrays():
    """For sums they were compiled once more, a quarter of a minute at a user's first plan."""
    layouts = set()

    def noted(ranks, items, sums, streams, ahead):
        arrays = (each for each in (*ranks, *items, *sums, *streams) if hasattr(each, "flags"))
        layouts.update(array.flags.c_contiguous for array in arrays)
        return _play(ranks, items, sums, streams, ahead)

    with patch.object(player, "_play", noted):
        play([SECOND, SECOND], 4)
        work = StageWork(1.0, 1.0, parts=((5.0, 0.5), (5.0, 1.0)))
        play([work, SECOND], 4, replicas=(2, 1))
    assert layouts == {True}


def test_messages_between_two_ranks_go_one_after_the_other():
    # Stages 1 and 2 are on rank 1. Side by side both messages would be there at 5.
    #         0   1   2   3   4   5
    # 0 to 1      10  10
    # 0 to 2              10  10
    links = {(0, 1): 20.0, (0, 2): 20.0}
    passes = {0: [((0, 0), Step(0, F, 0, 0))], 1: [((s, 0), Step(0, F, 0, 0)) for s in (1, 2)]}
    orders = Orders.of(schedule("flush", (1, 1, 1), links, 1), [[0], [1], [1]], passes.get)
    workload = Workload((SECOND,) * 3, links, links)
    found = simulate(orders.schedule, workload, ten_per_second(2), orders.ranks, orders.actions)
    assert received(found, 1) == [3, 5]


def test_a_gradient_does_not_wait_behind_an_activation_of_the_same_ranks():
    """It did: with stages 0 and 2 on one rank an order that the checker proves had a deadlock."""
    spec = PipelineSpec("flush", (1, 1, 1), ((0, 1), (1, 2)), 7, max_in_flight=(7, 7, 7))
    made = Schedule(spec, 7)

    def passes(rank):
        first = [(0, F, b) for b in range(7)]
        middle = [(2, kind, b) for b in range(6) for kind in (F, B)]
        last = [(0, B, b) for b in range(6)] + [(2, F, 6), (2, B, 6), (0, B, 6)]
        other = [(1, F, b) for b in range(6)] + [(1, B, b) for b in range(6)]
        order = first + middle + last if rank == 0 else [*other, (1, F, 6), (1, B, 6)]
        return (((stage, 0), Step(0, kind, b, 0)) for stage, kind, b in order)

    orders = Orders.of(made, [[0], [1], [0]], passes)
    check_ranks(orders.schedule, orders.actions, orders.assignment)
    workload = Workload((SECOND,) * 3, {(0, 1): 1.0, (1, 2): 1.0}, {(0, 1): 1.0, (1, 2): 1.0})
    found = simulate(made, workload, ten_per_second(2), orders.ranks, orders.actions)
    assert len(spans(found, 0, Kind.BACKWARD)) == 14


def test_a_message_so_small_that_it_is_all_latency_waits_for_its_receive_too():
    """It went at once: ten bytes were there before eleven that were sent with them."""
    link = Link(points=((10, 100.0), (20, 101.0)))
    cluster = {"send": (link,)}
    small, large = (
        play([SECOND] * 2, 10, {(0, 1): size}, name="gpipe", **cluster).events[1][-1].end
        for size in (10.0, 11.0)
    )
    assert small == pytest.approx(large, rel=0.01)


def test_what_goes_out_takes_nothing_from_what_comes_in():
    # A forward pass on rank 1 takes no time.
    #         0   1   2   3   4   5   6   7
    # 0 to 1      10  10  10  10
    # 1 to 2              10  10  10  10
    works = [StageWork(1.0, 1.0), StageWork(0.0, 1.0), SECOND]
    found = play(works, 2, {(0, 1): 20.0, (1, 2): 20.0})
    assert received(found, 1) == [3, 5]
    assert received(found, 2) == [5, 7]


def test_latency_comes_on_top_and_keeps_nobody_waiting():
    # The messages are through the ports at 2 and 3.
    found = play([SECOND, StageWork(0.5, 1.0)], 2, {(0, 1): 10.0}, name="gpipe", latency=(5.0,))
    assert received(found, 1) == [7, 8]


def test_a_message_waits_for_its_receive_to_be_posted():
    # The receiver has receives and passes by turns: eight receives are posted from the start, the
    # next ones only as it comes to its first passes, at 102 and 103.
    assert LOOK_AHEAD == 16
    found = play([SECOND] * 2, 10, {(0, 1): 10.0}, name="gpipe", latency=(100.0,))
    assert received(found, 1) == [102, 103, 104, 105, 106, 107, 108, 109, 203, 204]


def test_a_message_that_keeps_its_ranks_busy_lengthens_their_next_passes():
    # F1 of the sender has to do with the message of F0; so has F0 of the receiver.
    link = Link(bandwidth=10.0, busy=0.5)
    found = play([SECOND] * 2, 2, {(0, 1): 10.0}, send=(link,))
    assert spans(found, 0, Kind.FORWARD) == [(0, 1), (1, 2.5)]
    assert spans(found, 1, Kind.FORWARD)[0] == (2, 3.5)


def test_the_devices_of_a_machine_share_its_port():
    # 0 and 1 are in one machine, 2 and 3 in the other.
    #         0   1   2   3
    # 0 to 2      5   5
    # 1 to 3      5   5
    # 0 to 1      all of its 1000 bytes at once, inside the machine
    ways = {(0, 1): 1000.0, (0, 2): 10.0, (1, 3): 10.0}
    works = [StageWork(1.0, 1.0), StageWork(0.0, 1.0), SECOND, SECOND]
    found = play(works, 1, ways, machines=(2, 2), bandwidth=(FREE, 10.0))
    assert received(found, 1) == [1]
    assert received(found, 2) == [3]
    assert received(found, 3) == [3]


def test_a_sum_that_begins_in_the_backward_pass_may_be_over_before_it():
    #         0   1   2   3   4   5
    # pass    F   B   B   B   B
    # sum             10                 10 bytes, after a quarter of the pass
    work = StageWork(1.0, 4.0, parts=((10.0, 0.25),))
    found = play([work], 2, replicas=(2,))
    assert [spans(found, rank, Kind.ALL_REDUCE) for rank in (0, 1)] == [[(5, 5)]] * 2


def test_of_a_sum_in_parts_the_last_is_waited_for():
    #         0   1   2   3   4   5   6   7
    # pass    F   B   B   B   B
    # sum             10  10  10  10  10    30 bytes after a quarter, 20 after all: behind them
    work = StageWork(1.0, 4.0, parts=((30.0, 0.25), (20.0, 1.0)))
    found = play([work], 2, replicas=(2,))
    assert [spans(found, rank, Kind.ALL_REDUCE) for rank in (0, 1)] == [[(5, 7)]] * 2


def test_a_pass_beside_a_sum_that_keeps_the_ranks_busy_takes_longer():
    # In the two seconds of the sum half as much of the pass is done.
    #         0   1   2   3   4   5   6
    # pass    F   B   B   .5  .5  B
    # sum                 10  10            20 bytes, after a half
    work = StageWork(1.0, 4.0, parts=((20.0, 0.5),))
    busy = Link(bandwidth=10.0, busy=0.5)
    found = play([work], 2, replicas=(2,), send=(busy,))
    assert spans(found, 0, Kind.BACKWARD) == [(1, 6)]
    assert spans(found, 0, Kind.ALL_REDUCE) == [(6, 6)]


def test_a_sum_that_costs_more_than_its_own_time_stops_the_pass_for_so_long():
    # Once a link was busy for all of its time at most: of two replicas on one machine a tenth of
    # what they took was missing. The second sum, after the pass, takes its own time.
    #         0   1   2   3   4   5   6   7
    # pass    F   B   .   .   .   B   B
    # sum             20 bytes            10    after a third of the pass and after all of it
    work = StageWork(1.0, 3.0, parts=((20.0, 1 / 3), (10.0, 1.0)))
    busy = Link(bandwidth=10.0, busy=1.5)
    found = play([work], 2, replicas=(2,), send=(busy,))
    assert spans(found, 0, Kind.BACKWARD) == [(1, 7)]
    assert spans(found, 0, Kind.ALL_REDUCE) == [(7, 8)]


def test_a_sum_that_takes_all_of_the_ranks_hides_nowhere():
    # Of the pass of 214 ms and a sum of 27, 81 % busy, the simulator had made 218: as if all of the
    # pass were there to hide the sum in. 94 % of it are, and 22 ms of the sum are the ranks' own.
    work = StageWork(0.0, 0.214, parts=((27.0, 0.0),))
    found = play([work], 2, replicas=(2,), send=(Link(bandwidth=1000.0, busy=0.81),))
    ((begin, _),), ((_, end),) = (
        spans(found, 0, kind) for kind in (Kind.BACKWARD, Kind.ALL_REDUCE)
    )
    assert end - begin == pytest.approx(0.214 + 0.81 * 0.027)


def test_a_replica_without_a_minibatch_waits_for_the_sum_of_the_others():
    found = play([StageWork(1.0, 2.0, parameter_bytes=10.0)], 1, replicas=(2,))
    assert spans(found, 0, Kind.ALL_REDUCE) == [(3, 4)]
    assert spans(found, 1, Kind.ALL_REDUCE) == [(0, 4)]


def test_a_sum_and_a_message_share_a_port():
    # Ranks 1 and 2 are replicas. Both gradients go to rank 0, through one port; each of them goes
    # out through a port of the ring.
    #         0   1   2   3   4   5   6   7
    # rank 1      F   B
    # rank 2          F   B
    # 1 to 0              10  5   5          20 bytes
    # 2 to 0                  5   5   10     20 bytes
    # sum                     5   5          10 bytes, alone it would be over at 5
    works = [SECOND, StageWork(1.0, 1.0, parameter_bytes=10.0)]
    found = play(works, 2, backward={(0, 1): 20.0}, replicas=(1, 2))
    assert spans(found, 1, Kind.ALL_REDUCE) == [(3, 6)]
    assert spans(found, 2, Kind.ALL_REDUCE) == [(4, 6)]
    assert received(found, 0, Kind.RECV_GRADIENT) == [6, 7]


def test_a_norm_waits_for_all_ranks_and_takes_the_steps_of_a_ring():
    # Two steps of eight bytes over two ranks: 0.8 seconds through the ports, and two latencies.
    #         0   1   2   3   4   5   6   7   8
    # rank 0      F   .   .   .   B   N   N   N   0.8 + 2 seconds
    # rank 1      .   F   B   N ...
    works = [StageWork(1.0, 1.0, 0.5), StageWork(1.0, 1.0, 0.25)]
    found = play(
        works, 1, {(0, 1): 0.0}, {(0, 1): 0.0}, name="flush", joint_norm=True, latency=(1.0,)
    )
    assert spans(found, 0, Kind.BACKWARD) == [(5, 6)]
    assert spans(found, 0, Kind.NORM) == [(6, pytest.approx(8.8))]
    assert spans(found, 1, Kind.NORM) == [(4, pytest.approx(8.8))]
    assert spans(found, 0, Kind.UPDATE) == [(pytest.approx(8.8), pytest.approx(9.3))]


def test_a_rank_waits_at_the_last_norm_of_its_stages():
    # Stages 2 and 3 come to their norms at 8 and 7, and keep nobody waiting.
    #         0   1   2   3   4   5   6   7   8   9   10
    # rank 0      0F0 0F1 2F0 2F1 .   2B0 .   2B1 0B0 0B1
    # rank 1      .   1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1 N
    orders = with_norm(interleaved(2, 4, 2, 2))
    links = dict.fromkeys(orders.schedule.spec.links, 0.0)
    cluster = ten_per_second(2, bandwidth=(FREE,))
    workload = Workload((SECOND,) * 4, links, links)
    found = simulate(orders.schedule, workload, cluster, orders.ranks, orders.actions)
    assert spans(found, 0, Kind.NORM) == [(8, 8), (10, 10)]
    assert spans(found, 1, Kind.NORM) == [(7, 7), (9, 10)]


def test_a_norm_on_one_rank_takes_no_time():
    found = play([SECOND], 1, name="flush", joint_norm=True, latency=(1.0,))
    assert spans(found, 0, Kind.NORM) == [(2, 2)]


def test_in_both_plays_a_sum_after_the_pass_is_not_beside_it():
    # The sums of a second each take all of the ranks. 0.3 * 3.1 + (3.1 - 0.3 * 3.1) < 3.1 in
    # floats: for the slow play that little of the pass was left, with the second sum beside it.
    #         0   1     1.93  2.93                5.1   6.1
    # pass    F     0.93            2.17
    # sums                10                        10    bytes, after 0.3 of the pass and all of it
    work = StageWork(1.0, 3.1, parts=((10.0, 0.3), (10.0, 1.0)))
    busy = ten_per_second(2, send=(Link(bandwidth=10.0, busy=1.0),))
    orders = Orders.made(schedule("weight-stashing", (2,), (), 1), [[0, 1]])
    workload = Workload((work,), {}, {})
    found = simulate(orders.schedule, workload, busy, orders.ranks)
    slow = fluid_spans(orders.actions, workload, busy, orders.ranks)
    for rank, sums in ((0, (5.1, 6.1)), (1, (0, 6.1))):
        passes = [(0, 1), (1, 5.1)] if rank == 0 else []
        drawn = [pytest.approx(each) for each in (*passes, sums, (6.1, 6.1))]
        assert [(event.begin, event.end) for event in found.events[rank]] == drawn
        assert slow[rank] == drawn


# Against the slow one --------------------------------------------------------

# Small numbers, so that much happens at the same moment, and any others.
seconds = st.one_of(st.integers(0, 4).map(float), st.floats(0.01, 5))
sizes = st.one_of(st.sampled_from([0.0, 10.0, 20.0, 80.0]), st.floats(0.1, 80))
latencies = st.sampled_from([0.0, 0.0, 0.25, 2.0])
speeds = st.sampled_from([5.0, 10.0, 10.0, 30.0])


@st.composite
def works(draw):
    after = st.sampled_from([0.0, 0.3, 0.5, 1.0])
    parts = draw(st.lists(st.tuples(sizes, after), max_size=3))
    in_order = tuple(sorted(parts, key=lambda part: part[1]))
    return StageWork(
        *[draw(seconds) for _ in range(3)], parameter_bytes=draw(sizes), parts=in_order
    )


@st.composite
def workloads(draw, stages, links):
    forward, backward = ({link: draw(sizes) for link in links} for _ in range(2))
    return Workload(tuple(draw(works()) for _ in range(stages)), forward, backward)


@st.composite
def measured(draw):
    """A link that was measured, by a rate or by points; some keep the ranks busy."""
    busy = draw(st.sampled_from([0.0, 0.25, 1.0, 1.5]))
    if draw(st.booleans()):
        return Link(latency=draw(latencies), bandwidth=draw(speeds), busy=busy)
    more = [draw(st.floats(0.1, 2)) for _ in range(3)]
    points = tuple((5.0 * n**2, sum(more[:n])) for n in (1, 2, 3))
    return Link(points=points, busy=busy)


@st.composite
def clusters(draw, ranks):
    """Of one or two levels, with as many devices as there are ranks or a few more."""
    inside = draw(st.integers(1, ranks))
    machines = draw(st.sampled_from([(ranks,), (inside, -(-ranks // inside))]))
    maybe = st.one_of(st.none(), measured())
    send, sums = (tuple(draw(maybe) if count > 1 else None for count in machines) for _ in range(2))
    fast = draw(st.sampled_from([1.0, 2.0]))
    return Cluster(
        machines=machines,
        bandwidth=tuple(draw(speeds) for _ in machines),
        latency=tuple(draw(latencies) for _ in machines),
        send=send,
        all_reduce=sums,
        kinds=(DeviceType(name="one"), DeviceType(name="other", speed=fast)),
        machine_kinds=tuple(("one", "other")[n % 2] for n in range(machines[-1])),
    )


@st.composite
def chains(draw, stages):
    """Links from each stage to the next, and some that skip."""
    pairs = list(combinations(range(stages), 2))
    skips = draw(st.sets(st.sampled_from(pairs), max_size=2)) if pairs else set()
    return tuple(sorted(skips | {(stage, stage + 1) for stage in range(stages - 1)}))


@st.composite
def schedules(draw):
    replicas = [draw(st.integers(1, 3)) for _ in range(draw(st.integers(1, 4)))]
    name = draw(st.sampled_from(SCHEDULES))
    return schedule(
        name,
        replicas,
        draw(chains(len(replicas))),
        draw(st.integers(1, 10)),
        draw(st.integers(1, 5)),
        accumulate=draw(st.integers(1, 2)),
        joint_norm=uniform_updates(name) and draw(st.booleans()),
    )


def both_agree(data, orders, given_actions=True):
    """With any work on any cluster, on any of its devices."""
    spec, count = orders.schedule.spec, len(orders.actions)
    workload = data.draw(workloads(len(spec.replicas), spec.links))
    cluster = data.draw(clusters(count))
    place = data.draw(st.permutations(range(cluster.devices)))
    actions = {place[rank]: listed for rank, listed in orders.actions.items()}
    ranks = [[place[rank] for rank in of_stage] for of_stage in orders.ranks]
    # With the usual 16 few messages wait for their receives.
    ahead = data.draw(st.sampled_from([2, 4, 16]))
    with patch.object(simulator, "LOOK_AHEAD", ahead):
        found = simulate(
            orders.schedule, workload, cluster, ranks, actions if given_actions else None
        )
    expected = fluid_spans(actions, workload, cluster, ranks, ahead)
    assert found.events.keys() == expected.keys()
    for rank, events in found.events.items():
        assert [event.action for event in events] == actions[rank]
        for place_in_time in (0, 1):
            wanted = [span[place_in_time] for span in expected[rank]]
            times = [event[1 + place_in_time] for event in events]
            assert times == pytest.approx(wanted, rel=1e-9, abs=1e-12), f"rank {rank}"


@settings(deadline=None, max_examples=examples(150))
@given(st.data())
def test_every_schedule_goes_as_in_the_slow_play(data):
    made = data.draw(schedules())
    numbers = iter(range(sum(made.spec.replicas)))
    ranks = [[next(numbers) for _ in range(count)] for count in made.spec.replicas]
    both_agree(data, Orders.made(made, ranks), given_actions=False)


@settings(deadline=None, max_examples=examples(60))
@given(st.data())
def test_several_stages_on_a_rank_go_as_in_the_slow_play(data):
    ranks, chunks = data.draw(st.integers(1, 3)), 2
    stages, micro = ranks * chunks, ranks * data.draw(st.integers(1, 2))
    # Skips from a rank to itself: others have no one order.
    links = {(stage, stage + 1) for stage in range(stages - 1)} | {(0, ranks)}
    orders = interleaved(ranks, stages, 2 * micro, micro, sorted(links))
    both_agree(data, with_norm(orders) if data.draw(st.booleans()) else orders)


@settings(deadline=None, max_examples=examples(60))
@given(st.data())
def test_backward_passes_in_halves_go_as_in_the_slow_play(data):
    if data.draw(st.booleans()):
        stages = data.draw(st.integers(1, 4))
        orders = zero_bubble(stages, data.draw(st.integers(1, 8)), 4, data.draw(chains(stages)))
    else:
        orders = halved(data.draw(schedules()))
    both_agree(data, orders)


@given(
    st.dictionaries(st.integers(0, 7), st.sets(st.integers(0, 5), min_size=1)),
    st.lists(st.sampled_from([1.0, 2.0, 3.0, 10.0]), min_size=6, max_size=6),
)
def test_the_slow_plays_rates_are_fair(roads, capacity):
    """Each road passes a place that is full and where nobody has more: that makes them max-min fair
    (Bertsekas and Gallager, "Data Networks", 1992, section 6.5.2).
    """
    rates = fair_rates(roads, dict(enumerate(capacity)))
    through = {p: [rates[road] for road in roads if p in roads[road]] for p in range(6)}
    assert all(sum(through[p]) <= capacity[p] * (1 + 1e-9) for p in range(6))
    for road, places in roads.items():
        assert any(
            sum(through[p]) == pytest.approx(capacity[p]) and rates[road] >= max(through[p]) - 1e-9
            for p in places
        )
