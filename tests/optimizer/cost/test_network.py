"""Messages between 2 machines of 2 devices: 100 bytes/s inside, 10 bytes/s between them."""

import pytest

from pipedream.graph.cluster import Cluster, Link
from pipedream.optimizer.cost.network import Network, Port


@pytest.fixture
def network():
    return Network(Cluster(machines=(2, 2), bandwidth=(100.0, 10.0)))


@pytest.mark.parametrize(("one", "other", "level"), [(0, 1, 1), (2, 3, 1), (0, 2, 2), (1, 2, 2)])
def test_where_two_ranks_meet(network, one, other, level):
    assert network.meet(one, other) == network.meet(other, one) == level


def test_the_slowest_port_on_the_way_sets_the_time(network):
    assert network.message(0, 1, 50).total == 0.5
    assert network.message(2, 0, 50).total == 5.0


def test_messages_of_one_machine_share_its_way_out(network):
    out = Port(level=2, component=0, out=True)
    assert network.rate(out) == 10
    assert out in network.path(0, 2)
    assert out in network.path(1, 3)  # other devices at both ends
    assert out not in network.path(2, 0)  # the way back is another one
    assert out not in network.path(0, 1)


def test_a_ring_sends_twice_all_but_one_part(network):
    assert network.all_reduce((0, 1), 50).total == pytest.approx(0.5)
    assert network.all_reduce((0, 1, 2, 3), 40).total == pytest.approx(2 * 3 * 40 / 4 / 10)
    assert network.all_reduce((3,), 40).total == 0.0


def test_a_ring_passes_a_machine_once_each_way(network):
    ports = network.ring((3, 1, 0, 2))
    assert len(ports) == 4 * 2 + 2 * 2
    assert set(ports) == set(network.ring((0, 1, 2, 3)))


def test_latency_comes_on_top():
    network = Network(Cluster(machines=(2, 2), bandwidth=(100.0, 10.0), latency=(0.1, 0.5)))
    message = network.message(0, 2, 10)
    assert (message.seconds, message.latency) == pytest.approx((1.0, 0.5))
    ring = network.all_reduce((2, 3), 50)
    assert (ring.seconds, ring.latency) == pytest.approx((0.5, 2 * 0.1))


def test_a_measured_link_takes_what_was_measured():
    link = Link(points=((10, 1.0), (20, 4.0)), busy=0.5)
    cluster = Cluster(machines=(2,), bandwidth=(1.0,), send=(link,), all_reduce=(link,))
    message = Network(cluster).message(0, 1, 15)
    assert (message.total, message.busy) == pytest.approx((2.5, 1.25))
    ring = Network(cluster).all_reduce((0, 1), 15)
    # Once the latency did not count: two replicas on one machine, whose model has sums of eleven
    # buckets, were expected a twentieth too early.
    assert (ring.total, ring.busy) == pytest.approx((2.5, 1.25))
