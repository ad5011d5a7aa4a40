"""`python -m gpu_check`, which `scripts/gpu_check.sh` starts."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_check.check import Check, Outcome, Setting
from gpu_check.checks import CHECKS
from gpu_check.processes import adopt_orphans
from gpu_check.report import exit_code, heading, row, verdict, write_json
from gpu_check.runner import run_check

NO_GPU = 2
_ROOT = Path(__file__).parents[2]


def main(words: Sequence[str] | None = None, checks: Sequence[Check] = CHECKS) -> int:
    """Returns 0 if no bar was missed, 1 if one was or a check failed, 2 if there is no GPU."""
    options = _options(words, checks)
    wanted = [each for each in checks if not options.only or each.name in options.only]
    if unknown := set(options.only) - {each.name for each in wanted}:
        print(f"--only {min(unknown)}: there is no such check: {_names(checks)}", file=sys.stderr)
        return NO_GPU
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # who asks for GPUs can still fork
    machine = _machine()
    if options.device == "cuda" and not machine["gpus"]:
        print("gpu_check: torch sees no GPU here; --device cpu tries the commands", file=sys.stderr)
        return NO_GPU
    folder = options.output.resolve()
    shutil.rmtree(folder / "models", ignore_errors=True)  # profiles of another day
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = _run(wanted, Setting(options.device, folder), machine)
    print(f"{verdict(outcomes)}; written: {folder / 'check.json'}")
    return exit_code(outcomes)


def _options(words: Sequence[str] | None, checks: Sequence[Check]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_check.sh",
        description="Check pipedream on a GPU: print a table, and write check.json.",
        epilog="The exit code is 0 if every bar is met, 1 if one is missed or a check fails, 2 if "
        f"there is no GPU or an option is wrong. The checks: {_names(checks)}.",
    )
    parser.add_argument(
        "--device",
        choices=["cuda", "cpu"],
        default="cuda",
        help="cpu: try the commands with small sizes, skip what needs a GPU, and judge no figure "
        "[default: cuda]",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=_ROOT / "runs/gpu",
        help="folder for check.json and the log of each check [default: runs/gpu]",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME",
        help="run this check alone; give it again for another",
    )
    return parser.parse_args(words)


def _names(checks: Sequence[Check]) -> str:
    return ", ".join(each.name for each in checks)


def _machine() -> dict[str, Any]:
    command = [sys.executable, "-m", "gpu_check.machine"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        sys.exit(f"gpu_check: {sys.executable}: {last}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _run(checks: Sequence[Check], setting: Setting, machine: dict[str, Any]) -> list[Outcome]:
    """Shows each outcome when it is known, and keeps all in check.json from the first on."""
    adopt_orphans()
    gpus = ", ".join(machine["gpus"]) or "no GPU"
    print(f"{gpus}; torch {machine['torch']}" + "; on a CPU no figure is judged" * setting.small)
    print(heading(), flush=True)
    outcomes: list[Outcome] = []
    for check in checks:
        outcomes.append(run_check(check, setting, len(machine["gpus"])))
        print(row(outcomes[-1]), flush=True)
        write_json(setting.folder / "check.json", machine, outcomes)
    return outcomes


if __name__ == "__main__":
    sys.exit(main())
