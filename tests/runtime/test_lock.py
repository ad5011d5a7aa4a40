"""One run at a time in a folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from pipedream.graph.errors import UserError
from pipedream.runtime.trainer import locked

HOLD = """
import sys
from pathlib import Path
from pipedream.runtime.trainer import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_two_runs_in_one_folder_wrote_over_each_other(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="another run is at work"), locked(tmp_path):
            pass
        other.kill()  # the system lets go of the lock of a process that was killed
        other.wait(60)
        with locked(tmp_path):
            pass


HOLD_AND_FORK = """
import os, sys, time
from pathlib import Path
from pipedream.runtime.trainer import locked
with locked(Path(sys.argv[1])):
    if os.fork() == 0:
        print(os.getpid(), flush=True)
    time.sleep(60)
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_what_a_killed_run_had_forked_kept_its_folder(tmp_path):
    """Processes that read data live on for a while, or for ever if the dataset is stuck."""
    command = [sys.executable, "-c", HOLD_AND_FORK, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        child = int(run.stdout.readline())
        try:
            with pytest.raises(UserError, match="another run is at work"), locked(tmp_path):
                pass
            run.kill()
            run.wait(60)
            os.kill(child, 0)  # it is still there
            with locked(tmp_path):
                pass
        finally:
            os.kill(child, signal.SIGKILL)


def test_the_folder_is_made(tmp_path):
    with locked(tmp_path / "new" / "run"):
        pass
    assert (tmp_path / "new" / "run").is_dir()


def test_what_killed_runs_left_half_done_is_gone(tmp_path):
    """It stayed for good if the run was killed after its last checkpoint: while it deleted an old
    one, say, or wrote timeline.png, which the run that finishes it does not write again.
    """
    checkpoints = tmp_path / "checkpoints"
    kept = ["epoch-0003/state.json", "epoch-0003/optimizer/model.safetensors"]
    unfinished = ["epoch-0002.old/state.json", "epoch-0003-000004.partial/state.json"]
    for name in kept + unfinished:
        (checkpoints / name).parent.mkdir(parents=True)
        (checkpoints / name).touch()
    for name in ("latest", "latest.partial"):
        (checkpoints / name).symlink_to("epoch-0003")
    for name in (".timeline.partial.png", ".summary.partial.json", ".env", ".mine.partial.zip"):
        (tmp_path / name).touch()
    with locked(tmp_path):
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {".lock", ".env", ".mine.partial.zip", "checkpoints"}
        assert {path.name for path in checkpoints.iterdir()} == {"epoch-0003", "latest"}
        assert all((checkpoints / name).exists() for name in kept)
