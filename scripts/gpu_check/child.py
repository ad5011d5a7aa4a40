"""A measurement in a process of its own: `python -m gpu_check.child MEASURE ARGUMENTS DEVICE FOLDER
RESULT`, which `runner` starts. The result is a file of JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from gpu_check.check import Setting, Skipped


def main(measure: str, arguments: str, device: str, folder: str, result: str) -> None:
    module, _, name = measure.partition(":")
    function = getattr(importlib.import_module(module), name)
    try:
        found = function(Setting(device, Path(folder)), **json.loads(arguments))._asdict()
    except Skipped as why:
        found = {"skipped": str(why)}
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
