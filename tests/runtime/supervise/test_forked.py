"""Processes forked off the launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipedream.runtime.supervise.forked import Forked


def fail() -> int:
    raise RuntimeError("no more")


def leave(code: int | str | None) -> int:
    raise SystemExit(code)


def interrupt() -> int:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
    return 0


def test_it_ends_with_the_code_of_its_work(capfd: pytest.CaptureFixture[str]) -> None:
    assert Forked(lambda: 7).wait() == 7
    assert Forked(lambda: None).wait() == 0
    assert Forked(lambda: leave(3)).wait() == 3
    assert Forked(lambda: leave("in words")).wait() == 1
    assert Forked(interrupt).wait() == 130
    assert capfd.readouterr().err == ""
    assert Forked(fail).wait() == 1
    assert capfd.readouterr().err.splitlines()[-1] == "RuntimeError: no more"


def test_what_the_parent_has_yet_to_print_is_printed_once(tmp_path: Path) -> None:
    code = (
        "from pipedream.runtime.supervise.forked import Forked; print('parent', end=' '); "
        "Forked(lambda: print('child', end=' ')).wait(); print('parent')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "parent child parent\n"


def test_signals_of_the_parent_are_not_its_own() -> None:
    """It has a session of its own, and ends at a signal that the parent catches."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        child = Forked(lambda: time.sleep(60))
        assert os.getsid(child.pid) == child.pid
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.05)
        assert child.poll() is None
        child.signal_all(signal.SIGTERM)
        assert child.wait(20) == -signal.SIGTERM
        child.signal_all(signal.SIGTERM)  # nobody is left
    finally:
        signal.signal(signal.SIGTERM, before)


LAUNCHER = """
import sys
from pipedream.runtime import cli
from pipedream.runtime.supervise import launch

def spawn(work, workers, *others):
    torch = sys.modules["torch"]
    print("pipedream.runtime.trainer" in sys.modules, torch.cuda.is_initialized())
    print(torch.get_num_threads() == launch.threads_each(workers))
    print("OMP_NUM_THREADS" in cli.os.environ)
    return 0

launch.spawn = spawn
cli.main(["plan.json", "--config", "run.yaml"])
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_what_all_workers_need_is_imported_once_and_no_gpu_used(folder: Path) -> None:
    """Each imported it by itself, for three seconds, and again at each restart."""
    variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "True False\nTrue\nFalse\n"
