"""What machine and versions the figures belong to: `python -m gpu_check.machine` prints JSON."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

_SET = ("CUDA_", "NCCL_", "PYTORCH_", "TORCH_", "OMP_NUM_THREADS")


def describe() -> dict[str, Any]:
    """Returns GPUs, versions, and what is set in the environment that CUDA, NCCL and torch read."""
    count = torch.cuda.device_count()
    return {
        "gpus": [torch.cuda.get_device_name(number) for number in range(count)],
        "gpu_memory_bytes": [
            torch.cuda.get_device_properties(number).total_memory for number in range(count)
        ],
        "driver": _printed("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "topology": _printed("nvidia-smi", "topo", "-m") if count > 1 else "",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if count else None,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "commit": _printed("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_SET)},
    }


def _printed(*command: str) -> str:
    """Returns what a command prints; nothing where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


if __name__ == "__main__":
    print(json.dumps(describe()))
