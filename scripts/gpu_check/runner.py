"""One check after the other, each in its own process."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from gpu_check.check import Check, Outcome, Setting, State
from gpu_check.processes import run_within

_PATIENCE_ON_A_CPU = 4


def run_check(check: Check, setting: Setting, gpus: int) -> Outcome:
    """Runs a check where there are so many GPUs. On a CPU nothing is judged by its figure."""
    if setting.device != "cpu" and gpus < check.gpus:
        return Outcome(check, State.SKIPPED, 0.0, detail=f"needs {check.gpus} GPUs, here is {gpus}")
    begin = time.monotonic()
    log = setting.folder / f"{check.name.replace(' ', '-')}.log"
    result = log.with_suffix(".json")
    result.unlink(missing_ok=True)
    limit = check.seconds * (_PATIENCE_ON_A_CPU if setting.small else 1)
    code = run_within(
        _command(check, setting, result), limit, log, _environment(check, setting, gpus)
    )
    seconds = time.monotonic() - begin
    if code is None:
        why = f"not done within {limit:g} s, and killed: see {log}"
        return Outcome(check, State.FAILED, seconds, detail=why)
    if code != 0 or not result.exists():
        return Outcome(check, State.FAILED, seconds, detail=_why(code, log))
    return _judged(check, setting, json.loads(result.read_text()), seconds)


def _command(check: Check, setting: Setting, result: Path) -> list[str]:
    arguments = json.dumps(dict(check.arguments))
    words = (check.measure, arguments, setting.device, setting.folder, result)
    return [sys.executable, "-m", "gpu_check.child", *map(str, words)]


def _environment(check: Check, setting: Setting, gpus: int) -> dict[str, str]:
    """With one GPU in sight ranks share it, by gloo; else each would have its own."""
    if setting.small:
        return {**check.environment, "CUDA_VISIBLE_DEVICES": ""}
    one = {"CUDA_VISIBLE_DEVICES": first_gpu()} if check.gpus == 1 and gpus > 1 else {}
    return {**one, **check.environment}


def first_gpu() -> str:
    """Returns the first of the GPUs that the user wants to be used."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


def _judged(check: Check, setting: Setting, found: dict[str, object], seconds: float) -> Outcome:
    if "skipped" in found:
        return Outcome(check, State.SKIPPED, seconds, detail=str(found["skipped"]))
    value, detail = float(str(found["value"])), str(found["detail"])
    if check.bar is None or setting.device == "cpu":
        state = State.MEASURED
    else:
        state = State.PASSED if check.bar.admits(value) else State.MISSED
    return Outcome(check, state, seconds, value, detail)


def _why(code: int, log: Path) -> str:
    """Returns the last line of an exception, or how the process ended without one."""
    if code != 1:
        return f"{_ending(code)} before it had a result (see {log})"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1].strip() if lines else _ending(code)
    return f"{last} (see {log})"


def _ending(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
