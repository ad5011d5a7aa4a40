"""What a thread has to know of the device of its rank."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch


def start_thread(work: Callable[[], None], name: str, device: torch.device) -> threading.Thread:
    """Starts a daemon thread of a rank that computes on `device`, and may have to do with it.

    CUDA begins each thread with the first GPU: ranks of the others would have memory on it, too.
    """

    def on_device() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        work()

    thread = threading.Thread(target=on_device, name=name, daemon=True)
    thread.start()
    return thread
