"""The tests that need a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from gpu_check.check import Measured, Setting, Skipped

_ROOT = Path(__file__).parents[3]


def failures(setting: Setting, path: str) -> Measured:
    """Returns how many tests of a file fail. Raises Skipped where all of them are skipped."""
    report = setting.folder / f"{Path(path).stem}.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", path, f"--junitxml={report}", "--color=no"]
    environment = os.environ | {"GPU_TESTS_DEVICE": setting.device}  # tests/gpu read it
    code = subprocess.run(command, cwd=_ROOT, env=environment).returncode
    if not report.exists():
        raise RuntimeError(f"pytest ended with {code}: pip install pytest pytest-timeout")
    return counted(report)


def counted(report: Path) -> Measured:
    """Reads the file that pytest has written; names the tests that failed."""
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    tests, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    bad = [
        case.attrib["name"]
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    if tests == skipped:
        raise Skipped("all tests are skipped")
    also = f", {skipped} skipped" if skipped else ""
    names = f": {', '.join(bad)}" if bad else ""
    return Measured(len(bad), f"of {tests} tests{also}{names}")
