"""`--cluster auto`: the network between the workers of this machine is measured first."""

from pathlib import Path
from unittest.mock import patch

import pytest
from commands import typed

from pipedream.graph.errors import UserError
from pipedream.graph.plan import read_plan
from pipedream.graph.profile import Machine
from pipedream.optimizer.cli.measure_here import cluster_here, workers_here

TRANSLATION = str(Path(__file__).parents[1] / "translation.txt")
HERE = ["pd-optimize", TRANSLATION, "--cluster", "auto"]


def machine(**fields):
    known = {"device": "cpu", "device_name": "x", "threads": 1, "python": "3", "torch": "2"}
    return Machine(**(known | fields))


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(300)  # a minute on an idle machine
def test_plans_for_the_links_between_two_workers_here(tmp_path):
    done = typed(tmp_path, [*HERE, "--workers", "2", "-o", "plan"], seconds=280)
    assert done.code == 0, done.error
    assert done.error == "Measuring the network between 2 workers of this machine\n"
    cluster = read_plan(tmp_path / "plan" / "plan.json").cluster
    assert (cluster.machines, cluster.measured) == ((2,), True)
    assert (tmp_path / "plan" / "network" / "cluster.yaml").exists()
    assert "Assumed: links" not in done.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["pd-optimize", "missing.txt", "--cluster", "auto"], "missing.txt"),
        ([*HERE, "--machines", "2"], "both say what the cluster is"),
        ([*HERE, "--workers", "1"], "there is 1 worker here"),
    ],
)
def test_what_is_wrong_is_said_before_measuring(tmp_path, command, message):
    done = typed(tmp_path, [*command, "-o", "plan"])
    assert (done.code, done.out) == (2, "")
    assert message in done.error
    assert "Measuring" not in done.error


@pytest.mark.slow
def test_a_failed_measurement_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"pd-profile --network failed: .*file") as raised:
        cluster_here(2, "cpu", tmp_path / "file" / "network")
    assert len(str(raised.value.message).splitlines()) == 1


def test_as_many_workers_as_were_profiled_or_as_there_are_cores():
    with patch("os.sched_getaffinity", return_value=set(range(8))):
        assert workers_here(None) == 8
        assert workers_here(machine(threads=2)) == 4
        assert workers_here(machine(workers=3)) == 3


def test_a_worker_for_each_gpu(tmp_path):
    (tmp_path / "torch.py").write_text("class cuda:\n    device_count = staticmethod(lambda: 4)\n")
    with patch.dict("os.environ", {"PYTHONPATH": str(tmp_path)}):
        assert workers_here(machine(device="cuda")) == 4
