"""Profile, plan and train a PyTorch model as a pipeline, from Python.

`profile`, `optimize` and `train` do what the commands pd-profile, pd-optimize and pd-train do,
`evaluate` what pd-train --evaluate-only does;
`Pipeline` is for a training loop of one's own; `pipedream.adapters` has it for the trainers of
other libraries. `MetricsWriter` is the base of those that get what a run measures.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipedream.graph.errors import UserError
    from pipedream.planning import Planned, optimize
    from pipedream.profiling import Profiled, profile
    from pipedream.runtime.pipeline import Pipeline
    from pipedream.runtime.report.metrics.writer import MetricsWriter
    from pipedream.training import Run, evaluate, train

_PLACES = {
    "MetricsWriter": "pipedream.runtime.report.metrics.writer",
    "Pipeline": "pipedream.runtime.pipeline",
    "Planned": "pipedream.planning",
    "Profiled": "pipedream.profiling",
    "Run": "pipedream.training",
    "UserError": "pipedream.graph.errors",
    "evaluate": "pipedream.training",
    "optimize": "pipedream.planning",
    "profile": "pipedream.profiling",
    "train": "pipedream.training",
}

__all__ = [
    "MetricsWriter",
    "Pipeline",
    "Planned",
    "Profiled",
    "Run",
    "UserError",
    "evaluate",
    "optimize",
    "profile",
    "train",
]


def __getattr__(name: str) -> Any:
    """Imports what is asked for only now: the commands say --help without torch."""
    if name not in _PLACES:
        raise AttributeError(f"module 'pipedream' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return __all__
