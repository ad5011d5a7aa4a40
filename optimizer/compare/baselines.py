"""Baselines, plans made without a planner: equal layers, equal parameters, data parallelism.

The first two are straight pipelines along one topological order, with one stage per device.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pipedream.optimizer.cuts.planning_graph import Floats
from pipedream.optimizer.search.latency import Latency
from pipedream.optimizer.search.outcome import Outcome, fixed_outcome
from pipedream.optimizer.search.request import Request

_HALVINGS = 60


def equal_layers(request: Request, microbatches: int) -> Outcome:
    """As many nodes in each stage, an update per `microbatches` (GPipe, NeurIPS 2019)."""
    graph = request.planning
    stages = min(request.cluster.devices, len(graph))
    ends = [len(graph) * (stage + 1) // stages for stage in range(stages)]
    ours = replace(request, schedule="gpipe", microbatches=microbatches)
    outcome = fixed_outcome(ours, ends, [1] * stages)
    seconds = outcome.batch_seconds(Latency(microbatches))
    return outcome.predicting(microbatches=microbatches, latency_seconds=seconds)


def equal_parameters(request: Request) -> Outcome:
    """Minimizes the parameters of the stage that has most."""
    graph = request.planning
    stages = min(request.cluster.devices, len(graph))
    ends = balanced(graph.parameter_bytes, stages)
    return fixed_outcome(request, ends, [1] * stages)


def data_parallel(request: Request) -> Outcome:
    """The whole model on every device."""
    return fixed_outcome(request, [len(request.planning)], [request.cluster.devices])


def balanced(weights: Floats, pieces: int) -> list[int]:
    """The ends of `pieces` non-empty runs of consecutive entries whose heaviest is as light as
    possible, up to rounding.

    Bisects the weight limit; runs are filled up to it from the left.
    """
    assert 0 < pieces <= len(weights)
    before = np.concatenate([[0.0], np.cumsum(weights)])
    low, high = float(weights.max()), float(before[-1])
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if len(_filled(before, middle)) <= pieces else (middle, high)
    ends = _filled(before, high * (1 + 1e-12))
    while len(ends) < pieces:  # a run that is cut in two gets lighter
        begins = [0, *ends]
        sizes = [end - begin for begin, end in zip(begins, ends, strict=False)]
        longest = sizes.index(max(sizes))
        ends.insert(longest, ends[longest] - sizes[longest] // 2)
    return ends


def _filled(before: Floats, limit: float) -> list[int]:
    """Returns the ends of the longest runs that weigh at most `limit`."""
    ends = [0]
    while ends[-1] < len(before) - 1:
        end = int(np.searchsorted(before, before[ends[-1]] + limit, side="right")) - 1
        ends.append(max(end, ends[-1] + 1))
    return ends[1:]
