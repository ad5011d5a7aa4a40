"""A model's passes as the compute that sums of gradients go beside.

What a sum takes from a pass depends on the pass: one whose data a cache holds loses more to what
gloo copies and adds up than one that reads everything from memory anyway.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pipedream.capture.captured import flatten_inputs
from pipedream.capture.compute_settings import Precision
from pipedream.capture.export import capture
from pipedream.capture.sources.load import Loaded
from pipedream.profiler.network.interference import Work
from pipedream.profiler.timing.full_pass import passes


def model_work(loaded: Loaded, device: torch.device) -> Work:
    """Makes work of forward and backward passes; places are where a gradient is there, as in a run.

    Raises UserError if the model cannot be captured.
    """
    precision = Precision(loaded.autocast, device)
    captured = capture(loaded.model, loaded.args, loaded.kwargs, precision=precision)
    once = passes(captured, flatten_inputs(loaded.args, loaded.kwargs), device)
    learned = [parameter for parameter in captured.module.parameters() if parameter.requires_grad]
    listening: list[Callable[[], None]] = []

    def arrived(_: Tensor) -> None:
        for reached in listening:
            reached()

    for parameter in learned:
        parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]

    def run(reached: Callable[[], None]) -> None:
        reached()
        listening[:] = [reached]
        with precision.computing():
            once()

    return Work(run, places=1 + len(learned), gradient_bytes=sum(p.nbytes for p in learned))
