"""One run at a time in a folder."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pipedream.graph.command import UserError
from pipedream.runtime.lock import held

HOLD = """
import sys
from pathlib import Path
from pipedream.runtime.lock import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_two_runs_in_one_folder_wrote_over_each_other(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="another run is at work"), held(tmp_path):
            pass
        other.kill()  # the system lets go of the lock of a process that was killed
        other.wait(60)
        with held(tmp_path):
            pass


def test_the_folder_is_made(tmp_path):
    with held(tmp_path / "new" / "run"):
        pass
    assert (tmp_path / "new" / "run").is_dir()
