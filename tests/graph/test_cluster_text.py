"""The cluster file: what it says, and what is said of a wrong one, with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipedream.graph.cluster import Cluster, Link, read_cluster, write_cluster
from pipedream.graph.errors import UserError

CLUSTERS = Path(__file__).parents[2] / "configs" / "clusters"

WHOLE = """\
format: pipedream-cluster/1
levels:
  - name: device
    count: 4
    bandwidth: 10GB
    latency: 10us
    send: [[1kB, 20us], [1MB, 0.2ms]]
    all-reduce: {latency: 60us, bandwidth: 3GB}
  - name: machine
    count: 2
    bandwidth: 1e9
kinds:
  - {name: new, speed: 2, memory: 32GiB}
  - {name: old}
machine_kinds: [old, new]
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return path


def test_a_whole_file(tmp_path: Path) -> None:
    cluster = read_cluster(write(tmp_path, WHOLE))
    assert (cluster.machines, cluster.bandwidth) == ((4, 2), (1e10, 1e9))
    assert (cluster.latency, cluster.names) == ((1e-5, 0.0), ("device", "machine"))
    assert cluster.measured
    assert cluster.link(1) == Link(points=((1e3, 2e-5), (1e6, 2e-4)))
    assert cluster.link(2) == cluster.ring_link(2) == Link(bandwidth=1e9)
    # 6 steps, each of a quarter of the bytes
    step = cluster.ring_link(1)
    assert (step.latency, step.bandwidth) == pytest.approx((1e-5, 4.5e9))
    assert [cluster.kind(machine).name for machine in range(2)] == ["old", "new"]
    assert cluster.kind(0).memory is None
    assert cluster.kind(cluster.machine(5)).memory == 32 * 2**30


def test_a_cluster_written_and_read_is_the_same(tmp_path: Path) -> None:
    cluster = read_cluster(write(tmp_path, WHOLE))
    assert Cluster.model_validate_json(cluster.model_dump_json()) == cluster


def test_an_all_gather_is_written_and_read(tmp_path: Path) -> None:
    line = "    all-gather: {latency: 90us, bandwidth: 3GB}\n"
    text = WHOLE.replace("    bandwidth: 1e9\n", "    bandwidth: 1e9\n" + line)
    cluster = read_cluster(write(tmp_path, text))
    assert cluster.all_gather == (None, Link(latency=9e-5, bandwidth=3e9))
    path = tmp_path / "written.yaml"
    write_cluster(cluster, path)
    assert read_cluster(path).all_gather == cluster.all_gather
    with pytest.raises(UserError, match=r"12: levels\.1\.all-gather: a level with one"):
        read_cluster(write(tmp_path, text.replace("count: 2", "count: 1")))
    with pytest.raises(ValueError, match="measured at a level of one component"):
        Cluster(machines=(1,), bandwidth=(1.0,), all_gather=(Link(bandwidth=1.0),))


def test_one_kind_is_the_kind_of_all(tmp_path: Path) -> None:
    text = WHOLE.replace("  - {name: old}\nmachine_kinds: [old, new]\n", "")
    assert read_cluster(write(tmp_path, text)).machine_kinds == ("new", "new")


@pytest.mark.parametrize("path", sorted(CLUSTERS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_cluster_reads(path: Path) -> None:
    cluster = read_cluster(path)
    assert cluster.measured == (path.stem == "measured")
    assert bool(cluster.kinds) == (path.stem == "two_kinds")


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    cluster = read_cluster(write(tmp_path, WHOLE.replace("32GiB", "32GB")))
    busy = Link(points=((976.0, 21.5e-6), (62_500.0, 1.234e-3)), busy=0.61)
    cluster = cluster.model_copy(update={"send": (busy, Link(latency=5e-5, bandwidth=2.7e9))})
    path = tmp_path / "written.yaml"
    write_cluster(cluster, path, ["Made by hand.", "In two lines."])
    assert path.read_text().startswith("# Made by hand.\n# In two lines.\nformat: pipedream-")
    assert read_cluster(path) == cluster
    short = Cluster(machines=(2,), bandwidth=(1e9,))
    write_cluster(short, path)
    assert read_cluster(path) == short.model_copy(update={"names": ("level1",)})


WRONG = [
    (
        "format: pipedream-cluster/1",
        "format: cluster/9",
        "1: format: 'cluster/9' is not one of the choices: write 'pipedream-cluster/1'",
    ),
    ("count: 4", "count: 0", "4: levels.0.count: 0 is too small: give 1 or more"),
    ("count: 4", "count: four", "4: levels.0.count: 'four' is not a whole number"),
    (
        "bandwidth: 10GB",
        "bandwidth: fast",
        "5: levels.0.bandwidth: 'fast' is not an amount",
    ),
    ("bandwidth: 10GB", "bandwidth: 0", "5: levels.0.bandwidth: 0 is too small: give more than 0"),
    ("bandwidth: 10GB", "bandwidth: .inf", "5: levels.0.bandwidth: inf is not a finite number"),
    ("count: 4", "count: true", "4: levels.0.count: true is not a whole number"),
    ("count: 4", "count: 4.5", "4: levels.0.count: 4.5 is not a whole number"),
    ("bandwidth: 10GB", "bandwidth: yes", "5: levels.0.bandwidth: true is not a number"),
    ("bandwidth: 10GB", "bandwidth:", "5: levels.0.bandwidth: is empty"),
    ("name: machine", "name: ''", "9: levels.1.name: is empty"),
    ("name: machine", "name: 5", "9: levels.1.name: 5 is not text"),
    ("count: 2", "count: 2\n    count: 3", "11: count is given twice: remove one of them"),
    ("kinds:", "levels: []\nkinds:", "12: levels is given twice: remove one of them"),
    ("speed: 2", "speed: 2, speed: 3", "13: speed is given twice: remove one of them"),
    ("    bandwidth: 1e9\n", "", "9: levels.1.bandwidth: is missing"),
    ("latency: 10us", "latency: soon", "6: levels.0.latency: 'soon' is not a time: write 20us"),
    ("latency: 10us", "latency: -1", "6: levels.0.latency: -1 is too small: give 0 or more"),
    ("latency: 10us", "ping: 10us", "6: levels.0.ping: unknown field"),
    ("[1MB, 0.2ms]", "[1MB, 5us]", "7: levels.0.send: 1e+06 bytes take 5e-06 s, fewer take 2e-05"),
    ("[1MB, 0.2ms]", "[1kB, 5us]", "7: levels.0.send: 1000 bytes come after 1000: list the small"),
    ("[[1kB, 20us], [1MB, 0.2ms]]", "5us", "7: levels.0.send: give either latency and bandwidth"),
    ("[1kB, 20us]", "1kB", "7: levels.0.send.points.0: '1kB' is not a list"),
    (", [1MB, 0.2ms]", "", "7: levels.0.send: one point is not enough"),
    ("[1MB, 0.2ms]", "[1MB]", "7: levels.0.send.points.1.1: is missing"),
    ("{latency: 60us, bandwidth: 3GB}", "{latency: 60us}", "8: levels.0.all-reduce: give either"),
    ("bandwidth: 3GB}", "bandwidth: 3GB, n: 4}", "8: levels.0.all-reduce.n: unknown field"),
    (
        "count: 4",
        "count: 1",
        "8: levels.0.all-reduce: a level with one component has no all-reduce",
    ),
    ("speed: 2", "speed: 0", "13: kinds.0.speed: 0 is too small: give more than 0"),
    ("speed: 2", "speed: fast", "13: kinds.0.speed: 'fast' is not a number"),
    ("{name: old}", "old", "14: kinds.1: 'old' is not a set of named fields"),
    ("memory: 32GiB", "memory: lots", "13: kinds.0.memory: 'lots' is not an amount"),
    ("name: old", "name: new", "13: kinds: two kinds are called new"),
    ("[old, new]", "[old]", "15: machine_kinds: give the kind of each of the 2 machines"),
    ("[old, new]", "[old, newer]", "15: machine_kinds: there is no kind newer among new, old"),
    ("machine_kinds: [old, new]\n", "", "1: machine_kinds: give the kind of each of the 2"),
    ("levels:", "levels: []\nrooms:", "2: levels: [] is too short: give 1 or more"),
    ("[old, new]", "[old, new", "16: "),
]


@pytest.mark.parametrize(("right", "wrong", "says"), WRONG, ids=[case[2] for case in WRONG])
def test_a_wrong_file_is_one_line(tmp_path: Path, right: str, wrong: str, says: str) -> None:
    assert right in WHOLE
    path = write(tmp_path, WHOLE.replace(right, wrong, 1))
    with pytest.raises(UserError) as caught:
        read_cluster(path)
    message = caught.value.format_message()
    assert message.startswith(f"{path}:{says}")
    assert "\n" not in message
