"""A valid file of each kind that the tools read, as bytes."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.distributed.checkpoint.state_dict_saver import save

from pipedream.graph.run_config import RunConfig
from pipedream.runtime.checkpoint.files import publish, write_stage
from pipedream.runtime.run.training_segment import Position

_ROOT = Path(__file__).parents[3]

STAGE = "model-00001-of-00001.safetensors"
"""The file of a checkpoint with one stage."""

TENSORS = {
    "a.weight": torch.arange(6.0).reshape(2, 3),
    "a.bias": torch.ones(2),
    "norm.running_mean": torch.zeros(2, dtype=torch.float64),
}
"""Those of the checkpoints."""

_TIMES = {"median": 0.002, "lower": 0.001, "upper": 0.003}


@cache
def whole_file(name: str) -> bytes:
    """The content of a file of this name."""
    return _CONTENT[name]()


def plan_json() -> dict[str, Any]:
    """A diamond a -> b, c -> d in two stages: {a, b} on ranks 0 and 1, {c, d} on rank 2."""
    inputs = {"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]}
    memory = {"parameters": 8.0, "weight_versions": 8.0, "optimizer_state": 16.0, "gradients": 8.0}
    memory |= {"activations": 20.0, "recomputed": 0.0, "inputs": 3.0, "workspace": 1.0}
    memory |= {"buckets": 0.0, "allocator": 0.0}
    figures = {"compute_seconds": 0.5, "parameter_bytes": 8.0, "memory_bytes": 64.0}
    figures |= {"memory": memory, "zero": False, "offload": False}  # type: ignore[dict-item]
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


def _operators_json() -> dict[str, Any]:
    """A layer of four to two, forward and backward, where the input wants no gradient."""

    def tensor(*shape: int) -> dict[str, Any]:
        return {"shape": shape, "dtype": "float32", "element_bytes": 4}

    def call(
        name: str, target: str, reads: list[str], inputs: list[Any], output: Any, *more: Any
    ) -> dict[str, Any]:
        arguments = [*({"input": number} for number in range(len(reads))), *more]
        operator = {"target": target, "arguments": arguments, "inputs": inputs, "outputs": [output]}
        return {"name": name, "operator": operator, "reads": reads, "results": [name]}

    x, weight, output = tensor(8, 4), tensor(4, 2), tensor(8, 2)
    turned, scale = tensor(4, 8), {"kind": "float", "name": "inf"}
    given = {"w": ("parameter", weight), "x": ("input", x), "dy": ("tangent", output)}
    calls = [
        call("mm", "aten.mm.default", ["x", "w"], [x, weight], output),
        call("clamp", "aten.clamp.default", ["mm"], [output], output, -1.5, scale),
        call("t", "aten.t.default", ["x"], [x], turned),
        call("mm_1", "aten.mm.default", ["t", "dy"], [turned, output], weight),
    ]
    half = call("half", "aten.mm.default", ["x", "w"], [tensor(4, 4), weight], tensor(4, 2))
    return {
        "format": "pipedream-operators/1",
        "fingerprint": "f00d",
        "batch_size": 8,
        "graph": {
            "inputs": [
                {"value": value, "role": role, "name": value, "type": type_}
                for value, (role, type_) in given.items()
            ],
            "calls": calls,
            "outputs": [
                {"value": "clamp", "role": "output", "name": "0"},
                {"value": "mm_1", "role": "parameter gradient", "name": "w"},
            ],
        },
        "nodes": {each["name"]: "node2" for each in calls},
        "seconds": {"mm": 0.25, "clamp": 0.125, "t": 0.0, "mm_1": 0.5},
        "local_seconds": [
            {"operator": calls[0]["operator"], "seconds": 0.25},
            {"operator": half["operator"], "seconds": 0.15},
        ],
    }


def _lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _json(make: Callable[[], dict[str, Any]]) -> Callable[[], bytes]:
    return lambda: json.dumps(make(), indent=1).encode()


def _metrics() -> bytes:
    return _lines(
        [{"epoch": 1 + k // 4, "minibatch": k % 4, "loss": 1 / (k + 1)} for k in range(9)]
    )


def _held_out() -> bytes:
    return _lines([{"epoch": epoch, "held_out_loss": 1 / epoch} for epoch in (1, 2, 3)])


def _run_yaml() -> bytes:
    """A run config that has every field."""
    config = {
        "format": "pipedream-run/1",
        "model": {"source": "nets:model", "args": {"width": 4}},
        "data": {
            "source": "nets:data",
            "args": {"file": "a.txt"},
            "examples": 64,
            "varying": True,
            "inputs": ["tokens", "mask"],
            "target": "labels",
            "collate": "nets:collate",
        },
        "sampler": {"source": "torch.utils.data:RandomSampler"},
        "loss": "nets:loss",
        "optimizer": {
            "name": "Muon",
            "args": {"lr": 0.1, "ns_coefficients": [3.4, -4.8, 2.0]},
            "others": {"lr": 0.01},
            "groups": [{"match": ["*.bias"], "name": "SGD", "args": {"lr": 0.2}}],
        },
        "asynchronous": {
            "rate_correction": 5,
            "weight_prediction": True,
            "nesterov": 0.9,
            "error_feedback": 0.5,
            "basis_rotation": {"every": 10, "widest": 4096},
        },
        "scheduler": {
            "name": "ReduceLROnPlateau",
            "args": {"factor": 0.5},
            "every": "epoch",
            "metric": "held_out_loss",
        },
        "batch_size": 4,
        "drop_last": True,
        "microbatches": 4,
        "accumulate": 2,
        "clip_norm": 1.0,
        "autocast": "bfloat16",
        "loss_scale": 8.0,
        "nan": "skip",
        "compile": "inductor",
        "cuda_graphs": True,
        "zero": True,
        "data_workers": 2,
        "epochs": 3,
        "evaluate_every": 1,
        "held_out_metrics": {"f1": "nets:f1"},
        "seed": 7,
        "dtype": "float64",
        "metrics": ["wandb", {"source": "nets:Mail", "args": {"to": "me"}}],
    }
    assert config.keys() == RunConfig.model_fields.keys()
    return yaml.safe_dump(config, sort_keys=False).encode()


@cache
def _folder(make: Callable[[Path], None]) -> dict[str, bytes]:
    """The files in a folder that is made so."""
    with tempfile.TemporaryDirectory() as name:
        make(Path(name))
        return {path.name: path.read_bytes() for path in Path(name).rglob("*") if path.is_file()}


def _checkpoint(folder: Path) -> None:
    write_stage(folder, Position(1), 0, 1, TENSORS, {})
    whole = publish(folder, Position(1), 1)
    shutil.rmtree(whole / "optimizer")


def _dcp(folder: Path) -> None:
    state = {name: {"exp_avg": tensor, "step": torch.ones(())} for name, tensor in TENSORS.items()}
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": list(TENSORS)}]}
    save({"model": TENSORS, "optim": optimizer}, checkpoint_id=folder, no_dist=True)


def _timeline() -> bytes:
    rows = ["rank,action,begin_seconds,end_seconds", "0,0F0,0.0,0.5", "0,0SA0>1,0.5,0.6"]
    rows += ["1,1RA0<0,0.5,0.6", "1,1F0,0.6,0.9", "1,1B0,0.9,1.5", "0,0.1AR4/3@2,1.5,2.0"]
    return "\r\n".join(rows).encode()


_CONTENT: dict[str, Callable[[], bytes]] = {
    "graph.txt": (_ROOT / "profiles/vgg16/graph.txt").read_bytes,
    "profile.json": _json(_profile_json),
    "operators.json": _json(_operators_json),
    "plan.json": _json(plan_json),
    "measured.json": _json(_measured_json),
    "cluster.yaml": (_ROOT / "configs/clusters/two_kinds.yaml").read_bytes,
    "run.yaml": (_ROOT / "configs/digits.yaml").read_bytes,
    "state.json": _json(_state_json),
    "timeline.csv": _timeline,
    "metrics.jsonl": _metrics,
    "held_out.jsonl": _held_out,
    "every_field.yaml": _run_yaml,
    "summary.json": _json(lambda: {"schedule": "flush", "epochs": 2, "final_loss": 0.5}),
    "report": _metrics,
    "report, held out": _held_out,
    "model.safetensors.index.json": lambda: _folder(_checkpoint)["model.safetensors.index.json"],
    STAGE: lambda: _folder(_checkpoint)[STAGE],
    ".metadata": lambda: _folder(_dcp)[".metadata"],
    "__0_0.distcp": lambda: _folder(_dcp)["__0_0.distcp"],
}
