"""scripts/gpu_check, where there is no GPU: its table, JSON, limits and exit codes with made-up
checks; and that each real one can be called.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).parents[1] / "scripts"
sys.path.append(str(SCRIPTS))

from gpu_check.check import Bar, Setting, Skipped  # noqa: E402
from gpu_check.checks import CHECKS  # noqa: E402
from gpu_check.measures import models, queues, stream_pool  # noqa: E402
from gpu_check.measures.gpu_tests import counted  # noqa: E402
from gpu_check.measures.synchronisations import waits  # noqa: E402
from gpu_check.measures.two_ranks import halves_of_a_device  # noqa: E402

PROGRAM = """
import sys
from gpu_check import __main__ as command
from gpu_check.check import Bar, Check

command._machine = lambda: {{"gpus": {gpus}, "torch": "1.0"}}
made_up = lambda name, measure, bar=Bar(most=1), seconds=20, gpus=1, **arguments: Check(
    name, "made_up:" + measure, seconds, bar, "units", arguments, gpus
)
checks = [{checks}]
sys.exit(command.main(["-o", "out", *sys.argv[1:]], checks))
"""
MEASURES = """
import os, subprocess, sys, time
from pathlib import Path
from gpu_check.check import Measured, Skipped

def found(setting, value=1.0):
    return Measured(value, "seen: " + os.environ.get("CUDA_VISIBLE_DEVICES", "all"))

def no_package(setting):
    raise Skipped("pip install it")

def broken(setting):
    raise RuntimeError("out of luck")

def leaves(setting):
    print("so far so good")
    sys.exit(0)

def crashes(setting):
    print("so far so good", flush=True)
    os.abort()

def hangs(setting):
    grandchild = "import subprocess, sys, time; print(subprocess.Popen([sys.executable, '-c', "
    grandchild += "'import time; time.sleep(600)'], start_new_session=True,"
    grandchild += " stdout=-3, stderr=-3).pid)"  # DEVNULL, else who reads its output waits for it
    done = subprocess.run([sys.executable, "-c", grandchild], capture_output=True, text=True)
    Path("orphan").write_text(done.stdout)
    time.sleep(600)
"""


def run(
    folder: Path, checks: str, *options: str, gpus: tuple[str, ...] = ("A GPU",)
) -> tuple[int, str, list[dict[str, Any]]]:
    """The exit code, what was printed, and the checks in check.json."""
    (folder / "made_up.py").write_text(MEASURES)
    (folder / "program.py").write_text(PROGRAM.format(gpus=list(gpus), checks=checks))
    path = os.pathsep.join([str(folder), str(SCRIPTS), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "program.py", *options]
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    written = folder / "out/check.json"
    text = written.read_text() if written.exists() else '{"checks": []}'
    found = json.loads(text, parse_constant=pytest.fail)["checks"]
    return done.returncode, done.stdout + done.stderr, found


def test_the_table_and_the_json_have_what_was_found(tmp_path: Path) -> None:
    code, printed, checks = run(
        tmp_path,
        'made_up("good", "found"), made_up("only told", "found", bar=None, value=9),'
        'made_up("absent", "no_package"), made_up("for two", "found", gpus=2)',
    )
    assert code == 0, printed
    states = {each["name"]: each["state"] for each in checks}
    assert states == {
        "good": "passed",
        "only told": "measured",
        "absent": "skipped",
        "for two": "skipped",
    }
    assert [each["value"] for each in checks] == [1.0, 9.0, None, None]
    lines = printed.splitlines()
    assert lines[2].split()[:6] == ["good", "passed", "1", "units", "at", "most"]
    assert "pip install it" in lines[4]
    assert "needs 2 GPUs, here is 1" in lines[5]
    assert lines[6].startswith("1 passed, 1 measured, 2 skipped")


@pytest.mark.parametrize(
    ("check", "state", "why"),
    [
        ('made_up("this", "found", value=2)', "missed", "seen"),
        ('made_up("this", "found", value=float("nan"))', "missed", "seen"),
        ('made_up("this", "broken")', "failed", "RuntimeError: out of luck (see "),
        ('made_up("this", "leaves")', "failed", "exit code 0 before it had a result (see "),
        ('made_up("this", "crashes")', "failed", "killed by SIGABRT before it had a result (see "),
    ],
)
def test_a_missed_bar_and_a_failure_end_with_one(
    check: str, state: str, why: str, tmp_path: Path
) -> None:
    code, printed, (found, after) = run(tmp_path, f'{check}, made_up("after", "found")')
    assert code == 1, printed
    assert found["state"] == state
    assert why in found["detail"]
    assert after["state"] == "passed"


def test_a_check_that_hangs_is_killed_with_all_it_has_started(tmp_path: Path) -> None:
    begin = time.monotonic()
    code, printed, (found,) = run(tmp_path, 'made_up("this", "hangs", seconds=15)')
    assert (code, found["state"]) == (1, "failed"), printed
    assert "not done within 15 s" in found["detail"]
    assert time.monotonic() - begin < 60
    orphan = int((tmp_path / "orphan").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(orphan, 0)


def test_with_several_gpus_a_check_for_one_sees_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    checks = 'made_up("one", "found"), made_up("two", "found", gpus=2)'
    _, _, (one, two) = run(tmp_path, checks, gpus=("A GPU", "A GPU"))
    assert (one["detail"], two["detail"]) == ("seen: 3", "seen: 3,1")


def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path) -> None:
    code, printed, _ = run(tmp_path, 'made_up("this", "found")', gpus=())
    assert code == 2
    assert printed.splitlines() == [
        "gpu_check: torch sees no GPU here; --device cpu tries the commands"
    ]


def test_on_a_cpu_nothing_is_judged(tmp_path: Path) -> None:
    checks = 'made_up("this", "found", value=2), made_up("other", "broken")'
    code, _, found = run(tmp_path, checks, "--device", "cpu", gpus=())
    assert code == 1
    assert [each["state"] for each in found] == ["measured", "failed"]
    assert found[0]["detail"] == "seen: "
    code, printed, _ = run(tmp_path, checks, "--only", "thsi", "--device", "cpu", gpus=())
    assert (code, printed) == (2, "--only thsi: there is no such check: this, other\n")


def test_the_limits_for_one_gpu_come_to_less_than_ten_minutes() -> None:
    assert sum(each.seconds for each in CHECKS if each.gpus == 1) <= 600


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_each_check_can_be_called_as_it_is_listed(check: Any) -> None:
    module, _, name = check.measure.partition(":")
    function = getattr(importlib.import_module(module), name)
    inspect.signature(function).bind(Setting("cpu", Path()), **check.arguments)
    model = check.arguments.get("model", "gpt2")
    assert {model} <= models.configs(small=False).keys() == models.configs(small=True).keys()
    path = check.arguments.get("path")
    assert path is None or (SCRIPTS.parent / path).exists()


def test_bars() -> None:
    assert Bar(-0.1, 0.1).admits(-0.1)
    assert not Bar(most=0).admits(1)
    assert not Bar(least=0.95).admits(0.9)
    assert not Bar().admits(float("nan"))
    assert str(Bar(least=0.95)) == "at least 0.95"
    assert str(Bar(-0.25, 0.25)) == "-0.25 to 0.25"


def test_tests_are_counted_and_those_that_fail_named(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(
        '<testsuites><testsuite tests="3" skipped="1"><testcase name="a"/>'
        '<testcase name="b[x]"><failure/></testcase><testcase name="c"><skipped/></testcase>'
        "</testsuite></testsuites>"
    )
    assert counted(tmp_path / "report.xml") == (1, "of 3 tests, 1 skipped: b[x]")


def test_if_all_tests_are_skipped_it_says_why(tmp_path: Path) -> None:
    skipped = '<testcase><skipped message="needs 2 GPUs"/></testcase>'
    (tmp_path / "report.xml").write_text(
        f'<testsuites><testsuite tests="2" skipped="2">{2 * skipped}</testsuite></testsuites>'
    )
    with pytest.raises(Skipped, match=r"^needs 2 GPUs$"):
        counted(tmp_path / "report.xml")


def test_only_calls_that_wait_count_as_synchronisations() -> None:
    names = ["cudaLaunchKernel", "cudaStreamSynchronize", "cudaMemcpyAsync", "cudaMemcpy"]
    assert waits([*names, "cudaStreamSynchronize"]).total() == 3


def test_streams_of_a_pool_are_counted_until_one_comes_again() -> None:
    assert stream_pool.before_one_repeats([7, 8, 9, 7, 10]) == 3
    assert stream_pool.before_one_repeats([7, 8]) == 2


def test_a_device_of_two_ranks_is_half_for_each() -> None:
    cluster = halves_of_a_device({"levels": [{"count": 2, "bandwidth": 1e9}]})
    assert cluster["machine_kinds"] == ["half"] * 2


class Gpu:
    """One with so many hardware queues: what is behind a kernel that waits for another in its queue
    is not done.
    """

    def __init__(self, count: int) -> None:
        self.count, self.streams, self.current = count, 0, 0
        self.spinning: set[int] = set()
        self.blocked: set[int] = set()

    def stream(self) -> int:
        self.streams += 1
        return self.streams

    def sleep(self, cycles: int) -> None:
        if self.current in self.spinning:
            self.blocked.add(self.current % self.count)
        elif cycles > 1:
            self.spinning.add(self.current)

    def event(self) -> SimpleNamespace:
        place = SimpleNamespace(stream=-1)
        return SimpleNamespace(
            record=lambda: setattr(place, "stream", self.current),
            query=lambda: (
                place.stream not in self.spinning and place.stream % self.count not in self.blocked
            ),
        )

    def synchronize(self) -> None:
        self.spinning, self.blocked, self.current = set(), set(), 0


@pytest.mark.parametrize(("count", "stopped"), [(1, 32 * 31), (8, 32 * 3), (32, 0)])
def test_streams_that_share_a_queue_with_one_that_waits_are_found(
    count: int, stopped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(count)

    class Entered:
        def __init__(self, stream: int) -> None:
            gpu.current = stream

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    for name, fake in {
        "Stream": gpu.stream,
        "default_stream": lambda: 0,
        "stream": Entered,
        "_sleep": gpu.sleep,
        "Event": gpu.event,
        "synchronize": gpu.synchronize,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(queues, "_cycles_per_second", lambda: 1e9)
    monkeypatch.setattr(queues, "_LOOK", 0)
    assert queues.stopped_pairs(Setting("cuda", Path())) == (stopped, f"of {32 * 31}")
