"""Marks in what a GPU is given, which tell when it came to them."""

from __future__ import annotations

import torch


def timed_event(device: torch.device) -> torch.cuda.Event:
    """Returns an event behind all that the current stream of `device` has been given."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
