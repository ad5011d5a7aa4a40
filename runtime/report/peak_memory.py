"""The peak memory of a rank's tensors, and on a GPU what else is taken there."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from pipedream.comm.device.memory import give_back_freed, reset_peak_resident, resident_bytes


class PeakMemory:
    """Measures from when it is made, in stretches between `begin` and `end`.

    `bytes`: on a GPU torch's own count; `reserved` is then what torch held of the GPU to find room
    for them, `rest` what it did not know of at the ends of stretches: contexts, buffers of NCCL,
    other processes. Both are None on a CPU, where `bytes` is the resident memory of the process,
    without the files mapped into it, less what was resident when this was made and is none of the
    `tensors` that the rank had by then: the interpreter, torch, the dataset. What is freed and kept
    (`keep_freed_memory`) counts, too. `process` is then all that was resident at most, also without
    mapped files, of which the system can take memory back; None on a GPU.
    """

    def __init__(self, device: torch.device, tensors: Iterable[torch.Tensor]) -> None:
        self.device = device
        self.bytes = 0
        self.reserved: int | None = None
        self.rest: int | None = None
        self.process: int | None = None
        self.aside = 0
        if device.type == "cpu":
            give_back_freed()
            self.aside = resident_bytes("RssAnon") - sum(tensor.nbytes for tensor in tensors)

    def begin(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            reset_peak_resident()

    def now(self) -> int:
        """Returns the bytes at this moment."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        return max(0, resident_bytes("RssAnon") - self.aside)

    def end(self) -> None:
        """Ends a stretch: all figures are then the most since any `begin`."""
        if self.device.type == "cuda":
            now = torch.cuda.max_memory_allocated(self.device)
            self.reserved = max(self.reserved or 0, torch.cuda.max_memory_reserved(self.device))
            free, total = torch.cuda.mem_get_info(self.device)
            unknown = total - free - torch.cuda.memory_reserved(self.device)
            self.rest = max(self.rest or 0, unknown)
        else:
            most = resident_bytes("VmHWM") - resident_bytes("RssFile")
            self.process = max(self.process or 0, most)
            now = most - self.aside
        self.bytes = max(self.bytes, now)
