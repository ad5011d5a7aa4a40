"""Messages between 2 machines of 2 devices: 100 bytes/s inside, 10 bytes/s between them."""

import pytest

from pipedream.graph.cluster import Cluster, Link
from pipedream.optimizer.cost.network import Network


@pytest.fixture
def network():
    return Network(Cluster(machines=(2, 2), bandwidth=(100.0, 10.0)))


@pytest.mark.parametrize(("one", "other", "level"), [(0, 1, 1), (2, 3, 1), (0, 2, 2), (1, 2, 2)])
def test_where_two_ranks_meet(network, one, other, level):
    assert network.meet(one, other) == network.meet(other, one) == level


def test_the_slowest_port_on_the_way_sets_the_time(network):
    assert network.send(5.0, 0, 1, 50) == 5.5
    assert network.send(5.0, 2, 0, 50) == 10.0


def test_messages_of_one_machine_share_its_way_out(network):
    assert network.send(0.0, 0, 2, 10) == 1.0
    assert network.send(0.0, 1, 3, 10) == 2.0  # other devices at both ends
    assert network.send(0.0, 2, 0, 10) == 1.0  # the way back is another one
    assert network.send(0.0, 0, 1, 10) == 0.2  # inside; its own port was taken for 10/100 s


def test_a_ring_sends_twice_all_but_one_part(network):
    assert network.all_reduce(0.0, (0, 1), 50) == pytest.approx(0.5)
    fresh = Network(network.cluster)
    assert fresh.all_reduce(1.0, (0, 1, 2, 3), 40) == pytest.approx(1 + 2 * 3 * 40 / 4 / 10)
    assert fresh.all_reduce(1.0, (3,), 40) == 1.0


def test_all_reduces_of_two_stages_share_the_machines_ways(network):
    assert network.all_reduce(0.0, (0, 2), 10) == pytest.approx(1.0)
    assert network.all_reduce(0.0, (1, 3), 10) == pytest.approx(2.0)


def test_latency_comes_on_top_and_keeps_nobody_waiting():
    network = Network(Cluster(machines=(2, 2), bandwidth=(100.0, 10.0), latency=(0.1, 0.5)))
    assert network.send(0.0, 0, 2, 10) == pytest.approx(1.5)
    assert network.send(0.0, 0, 2, 10) == pytest.approx(2.5)  # not 3: the port was free at 1
    assert network.all_reduce(5.0, (2, 3), 50) - 5 == pytest.approx(0.5 + 2 * 0.1)


def test_a_measured_link_takes_what_was_measured():
    link = Link(points=((10, 1.0), (20, 4.0)))
    cluster = Cluster(machines=(2,), bandwidth=(1.0,), send=(link,), all_reduce=(link,))
    assert Network(cluster).send(0.0, 0, 1, 15) == pytest.approx(2.5)
    assert Network(cluster).all_reduce(0.0, (0, 1), 15) == pytest.approx(2.5)
