"""A valid file of each kind that the tools read, as bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[3]

_TIMES = {"median": 0.002, "lower": 0.001, "upper": 0.003}


@cache
def whole_file(name: str) -> bytes:
    """The content of a file of this name."""
    return _CONTENT[name]()


def plan_json() -> dict[str, Any]:
    """A diamond a -> b, c -> d in two stages: {a, b} on ranks 0 and 1, {c, d} on rank 2."""
    inputs = {"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]}
    memory = {"parameters": 8.0, "weight_versions": 8.0, "optimizer_state": 16.0, "gradients": 8.0}
    memory |= {"activations": 20.0, "inputs": 3.0, "workspace": 1.0}
    figures = {"compute_seconds": 0.5, "parameter_bytes": 8.0, "memory_bytes": 64.0}
    figures |= {"memory": memory}  # type: ignore[dict-item]
    return {
        "format": "pipedream-plan/1",
        "graph": {
            "fingerprint": "f00d",
            "nodes": [{"id": n, "description": n, "inputs": i} for n, i in inputs.items()],
        },
        "cluster": {"machines": [2, 2], "bandwidth": [1e10, 1e9]},
        "schedule": "weight-stashing",
        "optimizer": "adam",
        "stages": [
            {"stage": 0, "nodes": ["a", "b"], "ranks": [0, 1], **figures, "recompute": True},
            {"stage": 1, "nodes": ["c", "d"], "ranks": [2], **figures, "recompute": False},
        ],
        "predicted": {
            "cost_model": "paper",
            "objective": "throughput",
            "seconds_per_minibatch": 0.5,
            "lower_bound_seconds": 0.4,
            "one_worker_seconds": 1.0,
            "data_parallel_seconds": 0.7,
        },
    }


def _measured_json() -> dict[str, Any]:
    ranks = [
        {
            "rank": rank,
            "stage": stage,
            "replica": replica,
            "minibatches": 9,
            "forward": _TIMES,
            "backward": _TIMES,
            "updates": 9,
            "update": _TIMES,
        }
        for rank, (stage, replica) in enumerate([(0, 0), (0, 1), (1, 0)])
    ]
    return {
        "format": "pipedream-measured/1",
        "device": "cpu",
        "threads": 1,
        "batch_size": 8,
        "schedule": "weight-stashing",
        "seconds_per_minibatch": 0.01,
        "ranks": ranks,
        "plan": plan_json(),
    }


def _state_json() -> dict[str, Any]:
    training = {"rates": {"last_epoch": 3}, "scaler": None}
    details = {"optimizer": "SGD", "batch_size": 8}
    return {
        "format": "pipedream-checkpoint/1",
        "epoch": 1,
        "minibatch": 2,
        "training": training,
        "details": details,
    }


def _profile_json() -> dict[str, Any]:
    """The first layers of one that was measured."""
    whole: dict[str, Any] = json.loads((_ROOT / "profiles/vgg16/profile.json").read_text())
    return whole | {"nodes": whole["nodes"][:4]}


def _lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _json(make: Callable[[], dict[str, Any]]) -> Callable[[], bytes]:
    return lambda: json.dumps(make(), indent=1).encode()


def _metrics() -> bytes:
    return _lines(
        [{"epoch": 1 + k // 4, "minibatch": k % 4, "loss": 1 / (k + 1)} for k in range(9)]
    )


def _held_out() -> bytes:
    return _lines([{"epoch": epoch, "loss": 1 / epoch} for epoch in (1, 2, 3)])


def _timeline() -> bytes:
    rows = ["rank,action,begin_seconds,end_seconds", "0,0F0,0.0,0.5", "0,0SA0>1,0.5,0.6"]
    rows += ["1,1RA0<0,0.5,0.6", "1,1F0,0.6,0.9", "1,1B0,0.9,1.5", "0,0.1AR4/3@2,1.5,2.0"]
    return "\r\n".join(rows).encode()


_CONTENT: dict[str, Callable[[], bytes]] = {
    "graph.txt": (_ROOT / "profiles/vgg16/graph.txt").read_bytes,
    "profile.json": _json(_profile_json),
    "plan.json": _json(plan_json),
    "measured.json": _json(_measured_json),
    "cluster.yaml": (_ROOT / "configs/clusters/two_kinds.yaml").read_bytes,
    "run.yaml": (_ROOT / "configs/digits.yaml").read_bytes,
    "state.json": _json(_state_json),
    "timeline.csv": _timeline,
    "metrics.jsonl": _metrics,
    "held_out.jsonl": _held_out,
}
