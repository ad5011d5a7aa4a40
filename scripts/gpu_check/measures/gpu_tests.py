"""The tests that need a GPU."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from gpu_check.check import Measured, Setting, Skipped

_ROOT = Path(__file__).parents[3]
_SECONDS_EACH = 90


def failures(setting: Setting, path: str) -> Measured:
    """Returns how many tests of a file fail. Raises Skipped, with why, if all are skipped."""
    report = setting.folder / f"{Path(path).stem}.xml"
    report.unlink(missing_ok=True)
    # With -v the log has the name of the one that hangs.
    options = ("-v", "-rs", f"--timeout={_SECONDS_EACH}", "--color=no")
    command = [sys.executable, "-m", "pytest", path, f"--junitxml={report}", *options]
    code = subprocess.run(command, cwd=_ROOT).returncode
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
        reasons = {each.attrib["message"]: None for each in suite.iter("skipped")}
        raise Skipped("; ".join(reasons))
    also = f", {skipped} skipped" if skipped else ""
    names = f": {', '.join(bad)}" if bad else ""
    return Measured(len(bad), f"of {tests} tests{also}{names}")
