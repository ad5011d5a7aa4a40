"""Workers as real processes: started, failing, killed, interrupted, orphaned."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from textwrap import dedent

import pytest

from pipedream.runtime.supervise.launch import PEER_LOST, spawn

# What a worker of the tests is: it writes its process id down, then does what the test says.
WORKER = """
import os, signal, subprocess, sys, time
from pathlib import Path
from pipedream.comm.rank_info import restarts
from pipedream.runtime.supervise import launch
rank = int(os.environ["RANK"])
folder = Path(sys.argv[1])
(folder / f"{rank}.new").write_text(str(os.getpid()))
(folder / f"{rank}.new").rename(folder / f"{rank}.pid")
while len(list(folder.glob("*.pid"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)  # one that ends before another has begun would have it killed unseen
"""

LAUNCHER = """
import runpy, sys
from pipedream.runtime.supervise.launch import spawn

def work(rank_info, heartbeats):
    sys.argv = [{worker!r}, {folder!r}]
    runpy.run_path({worker!r}, dict(heartbeats=heartbeats))
    return 0

"""


@pytest.fixture
def start(tmp_path):
    """Starts `spawn` in a process of its own, with workers that run `script`; ends it at last."""
    started = []

    def start(script, workers=2, variables=None, **options):
        worker = tmp_path / "worker.py"
        worker.write_text(WORKER + dedent(script))
        code = LAUNCHER.format(worker=str(worker), folder=str(tmp_path))
        code += f"sys.exit(spawn(work, {workers}, **{options!r}))"
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(variables or {})},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
    for path in [*tmp_path.glob("*.pid"), *tmp_path.glob("helper?")]:  # should a test have failed
        with suppress(ProcessLookupError):
            os.kill(int(path.read_text()), signal.SIGKILL)


def pids(folder, workers=2):
    """The process ids of the workers, once all have started."""
    until(lambda: len(list(folder.glob("*.pid"))) == workers)
    return [int((folder / f"{rank}.pid").read_text()) for rank in range(workers)]


def until(condition, seconds=90):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def finished(process, folder, workers=2):
    """Exit code, stdout and stderr, when no worker is left behind."""
    out, error = process.communicate(timeout=60)
    assert not any(alive(pid) for pid in pids(folder, workers))
    return process.returncode, out, error


FOREVER = "time.sleep(600)\n"


@pytest.mark.slow
def test_all_go_well(start, tmp_path):
    # In one piece: what print writes in several ends up between the pieces of other workers.
    script = (
        "said = ' '.join(os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK'))\n"
        "os.write(1, (said + chr(10)).encode())\n"
    )
    code, out, error = finished(start(script, workers=3), tmp_path, 3)
    assert (code, error) == (0, "")
    assert sorted(out.splitlines()) == ["0 3 0", "1 3 1", "2 3 2"]


@pytest.mark.slow
def test_workers_share_the_cores_and_one_port(start, tmp_path, monkeypatch):
    script = (  # in one piece, as above
        "said = ' '.join(os.environ[n] for n in ('OMP_NUM_THREADS', 'MASTER_PORT'))\n"
        "os.write(1, (said + chr(10)).encode())\n"
    )
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    _, out, _ = finished(start(script), tmp_path)
    first, second = out.splitlines()
    assert first == second
    assert first.split()[0] == str(max(1, len(os.sched_getaffinity(0)) // 2))
    _, out, _ = finished(start(script, variables={"OMP_NUM_THREADS": "7"}), tmp_path)
    assert [line.split()[0] for line in out.splitlines()] == ["7", "7"]


@pytest.mark.slow
def test_workers_that_change_their_plan_are_started_again_without_a_word(start, tmp_path):
    """As often as they like: it takes none of the restarts after a failure."""
    script = """
    again = restarts()
    if again < 2:
        os._exit(launch.RETUNED if rank == 0 or again else 0)
    os.write(1, f"{rank} {again};".encode())
    """
    code, out, error = finished(start(script), tmp_path)
    assert (code, error) == (0, "")
    assert sorted(out.strip(";").split(";")) == ["0 2", "1 2"]


@pytest.mark.slow
def test_killed_worker_is_named_and_the_others_stopped(start, tmp_path):
    process = start(FOREVER)
    os.kill(pids(tmp_path)[1], signal.SIGKILL)
    code, _, error = finished(process, tmp_path)
    assert (code, error) == (1, "pd-train: rank 1 was killed by SIGKILL; all workers stopped\n")


@pytest.mark.slow
def test_a_signal_without_a_name_is_told_by_its_number(start, tmp_path):
    """The launcher ended with a traceback, and started nothing again."""
    process = start(FOREVER)
    os.kill(pids(tmp_path)[1], signal.SIGRTMIN + 3)
    code, _, error = finished(process, tmp_path)
    line = f"pd-train: rank 1 was killed by signal {signal.SIGRTMIN + 3}; all workers stopped\n"
    assert (code, error) == (1, line)


@pytest.mark.slow
def test_it_is_told_what_the_lost_worker_was_doing(start, tmp_path):
    process = start("heartbeats.report(rank, f'in epoch 1 at {rank}F7')\n" + FOREVER)
    os.kill(pids(tmp_path)[1], signal.SIGKILL)
    _, _, error = finished(process, tmp_path)
    line = "pd-train: rank 1 was killed by SIGKILL in epoch 1 at 1F7; all workers stopped\n"
    # Unless it was killed before it had said anything.
    assert error in (line, line.replace(" in epoch 1 at 1F7", ""))


@pytest.mark.slow
def test_a_stopped_worker_is_noticed(start, tmp_path):
    """It neither dies nor answers; its heartbeat stands still."""
    process = start("heartbeats.report(rank, f'at {rank}B3')\n" + FOREVER, timeout=1.5)
    workers = pids(tmp_path)
    time.sleep(1.0)
    os.kill(workers[1], signal.SIGSTOP)
    begin = time.monotonic()
    code, _, error = finished(process, tmp_path)
    assert code == 1
    assert error == "pd-train: rank 1 has not responded for 1.5 s at 1B3; all workers stopped\n"
    assert time.monotonic() - begin < 10


@pytest.mark.slow
def test_one_whose_gpu_hangs_is_named_and_started_again(start, tmp_path):
    """Its heartbeat goes on."""
    script = """
    if rank == 1 and restarts() == 0:
        looks = []
        def look(seconds):
            looks.append(seconds)
            return "has not responded for 9 s at 1F3" if sum(looks) > 0.5 else None
        heartbeats.look = look
    time.sleep(0 if restarts() else 60)
    """
    code, _, error = finished(start(script, restarts=1), tmp_path)
    line = "pd-train: rank 1 has not responded for 9 s at 1F3; restart 1 of 1\n"
    assert (code, error) == (0, line)


@pytest.mark.slow
def test_one_that_is_not_at_work_yet_may_stand_still(start, tmp_path):
    """It imports libraries, say, and no other thread of it can run meanwhile."""
    script = """
    if rank == 1:
        stopped = subprocess.Popen(["sh", "-c", f"kill -STOP {os.getpid()}; sleep 2; "
                                    f"kill -CONT {os.getpid()}"])
        stopped.wait()
    heartbeats.report(rank, "at 0F0")
    """
    code, _, error = finished(start(script, timeout=1.0), tmp_path)
    assert (code, error) == (0, "")


@pytest.mark.slow
def test_the_one_that_all_others_have_lost_is_named(start, tmp_path):
    script = f"""
    heartbeats.report(rank, f"at {{rank}}F2")
    heartbeats.report_lost(rank, 0 if rank == 1 else 1)
    time.sleep(0.3)
    sys.exit({PEER_LOST})
    """
    code, _, error = finished(start(script, workers=3), tmp_path, 3)
    assert code == 1
    line = "pd-train: rank 1 no longer responds to the other ranks at 1F2; all workers stopped\n"
    assert error == line


@pytest.mark.thorough
@pytest.mark.slow
def test_one_that_was_stopped_on_its_way_to_the_others_is_named(start, tmp_path):
    """It has said nothing yet, and they do not know whom they wait for."""
    script = f"""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    sys.exit({PEER_LOST})
    """
    code, _, error = finished(start(script, workers=3), tmp_path, 3)
    assert code == 1
    line = "pd-train: rank 1 no longer responds to the other ranks; all workers stopped\n"
    assert error == line


@pytest.mark.slow
def test_workers_are_started_again(start, tmp_path):
    """As often as was asked for; nobody of the run before is there any more."""
    script = """
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    (folder / f"{rank}-{attempt}").write_text(str(os.getpid()))
    while len(list(folder.glob("?-" + attempt))) < 2:
        time.sleep(0.01)
    if rank == 1 and attempt < "2":
        os.abort()
    if attempt < "2":
        time.sleep(600)
    """
    process = start(script, restarts=3)
    code, _, error = finished(process, tmp_path)
    killed = "pd-train: rank 1 was killed by SIGABRT; "
    assert error.splitlines() == [killed + "restart 1 of 3", killed + "restart 2 of 3"]
    assert code == 0
    assert not any(alive(int(path.read_text())) for path in tmp_path.glob("?-?"))


@pytest.mark.slow
def test_it_goes_on_with_fewer_until_none_is_left(start, tmp_path):
    script = """
    if rank == int(os.environ["WORLD_SIZE"]) - 1:
        os.abort()
    time.sleep(600)
    """
    code, _, error = finished(start(script, restarts=1, with_fewer=True), tmp_path)
    rank = "pd-train: rank {} was killed by SIGABRT; {}".format
    assert error.splitlines() == [
        rank(1, "restart 1 of 1"),
        rank(1, "going on with 1 worker"),
        rank(0, "restart 1 of 1"),
        rank(0, "no worker is left to plan for"),
    ]
    assert code == 1


def test_one_that_cannot_be_started_is_lost(capsys, monkeypatch):
    def refuse():
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", refuse)
    assert spawn(lambda rank_info, heartbeats: 0, 2, with_fewer=True) == 1
    line = "pd-train: rank 0 cannot be started: Resource temporarily unavailable; "
    assert capsys.readouterr().err.splitlines() == [
        line + "going on with 1 worker",
        line + "no worker is left to plan for",
    ]


@pytest.mark.slow
def test_an_error_of_the_user_is_not_tried_again(start, tmp_path):
    code, _, error = finished(start("sys.exit(2)", restarts=3), tmp_path)
    assert (code, error) == (2, "")


@pytest.mark.slow
def test_those_who_have_lost_one_that_failed_may_end_by_themselves(start, tmp_path):
    """They were stopped at once, now and then before they had told the writers of metrics."""
    script = """
    if rank == 1:
        sys.exit(2)
    time.sleep(0.2)
    (folder / "told").touch()
    time.sleep(60)
    """
    process = start(script)
    assert finished(process, tmp_path)[0] == 2
    assert (tmp_path / "told").exists()


@pytest.mark.slow
def test_failed_worker_is_named(start, tmp_path):
    process = start("if rank == 1: sys.exit(7)\n" + FOREVER)
    code, _, error = finished(process, tmp_path)
    assert (code, error) == (1, "pd-train: rank 1 failed with exit code 7; all workers stopped\n")


@pytest.mark.slow
def test_a_worker_that_lost_its_reader_is_named_and_started_again(start, tmp_path):
    script = """
    heartbeats.report(rank, "at 1F2, minibatch 2 (it was killed)")
    if rank == 1 and restarts() == 0:
        os._exit(launch.DATA_LOST)
    time.sleep(0 if restarts() else 60)
    """
    code, _, error = finished(start(script, restarts=1), tmp_path)
    assert (code, error) == (
        0,
        "pd-train: rank 1 lost a process that reads its data (data_workers) at 1F2, minibatch 2 "
        "(it was killed); restart 1 of 1\n",
    )


@pytest.mark.slow
def test_one_that_lost_its_peers_is_not_the_cause(start, tmp_path):
    """Rank 0 notices that rank 1 is going before rank 1 is gone."""
    script = f"if rank == 0: sys.exit({PEER_LOST})\ntime.sleep(1)\nos.abort()"
    code, _, error = finished(start(script), tmp_path)
    assert (code, error) == (1, "pd-train: rank 1 was killed by SIGABRT; all workers stopped\n")


@pytest.mark.slow
def test_connection_lost_and_nobody_dead(start, tmp_path):
    process = start(f"sys.exit({PEER_LOST})")
    code, _, error = finished(process, tmp_path)
    assert code == 1
    assert error == "pd-train: rank 0 lost its connection to the others; all workers stopped\n"


@pytest.mark.slow
def test_one_line_for_an_error_of_the_user_that_all_workers_have(start, tmp_path):
    script = """
    launch.record_error("run.yaml: no such loss", heartbeats)
    sys.exit(2)
    """
    code, _, error = finished(start(script, workers=4), tmp_path, 4)
    assert (code, error) == (2, "pd-train: run.yaml: no such loss\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "line"),
    [
        (signal.SIGINT, 130, "pd-train: interrupted; all workers stopped\n"),
        (signal.SIGTERM, 143, "pd-train: got SIGTERM; all workers stopped\n"),
    ],
)
def test_signals_stop_all(start, tmp_path, number, code, line):
    process = start(FOREVER)
    pids(tmp_path)
    process.send_signal(number)
    found, _, error = finished(process, tmp_path)
    assert (found, error) == (code, line)


@pytest.mark.slow
def test_a_worker_that_dies_while_it_drains_is_not_started_again(start, tmp_path):
    """It was, only to be told at once that all workers were stopped."""
    script = """
    heartbeats.report(rank, "at 1B4")
    (folder / f"{rank}.said").touch()
    while not heartbeats.stop_requested:
        time.sleep(0.01)
    sys.exit(3 if rank else time.sleep(60))
    """
    process = start(script, restarts=1)
    until(lambda: len(list(tmp_path.glob("*.said"))) == 2)
    process.send_signal(signal.SIGINT)
    code, _, error = finished(process, tmp_path)
    line = "pd-train: rank 1 failed with exit code 3 at 1B4; all workers stopped"
    assert (code, error.splitlines()[-1]) == (1, line)


@pytest.mark.slow
def test_workers_that_have_saved_end_the_run_as_ctrl_c_does(start, tmp_path):
    code, _, error = finished(start("sys.exit(launch.STOPPED)", restarts=1), tmp_path)
    assert (code, error) == (130, "")


@pytest.mark.slow
def test_a_worker_that_was_interrupted_by_itself_has_not_saved(start, tmp_path):
    """It was taken for one that had: the run ended with no word, and nothing started it again."""
    script = "sys.exit(0 if restarts() else 130)"
    code, _, error = finished(start(script, workers=1, restarts=1), tmp_path, 1)
    assert (code, error) == (0, "pd-train: rank 0 failed with exit code 130; restart 1 of 1\n")


@pytest.mark.slow
def test_deaf_workers_are_killed(start, tmp_path):
    """And Ctrl-C pressed again meanwhile changes nothing."""
    process = start("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FOREVER)
    pids(tmp_path)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    code, _, _ = finished(process, tmp_path)
    assert code == 130


@pytest.mark.slow
def test_no_orphans_when_the_parent_is_killed(start, tmp_path):
    """Not even the processes that a worker has started, such as those that load data."""
    script = """
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (folder / f"helper{rank}.new").write_text(str(helper.pid))
    (folder / f"helper{rank}.new").rename(folder / f"helper{rank}")
    """
    process = start(script + FOREVER)
    workers = pids(tmp_path)
    until(lambda: len(list(tmp_path.glob("helper?"))) == 2)
    helpers = [int(path.read_text()) for path in tmp_path.glob("helper?")]
    process.kill()
    process.wait()
    until(lambda: not any(map(alive, workers + helpers)))
