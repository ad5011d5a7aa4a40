"""Runs of plans whose stages are on meshes of devices, and the same stages each on one device."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import sharded_models
import torch
import yaml
from order_runs import pieces
from plans import make_plan
from training import run_jobs

from pipedream.capture.captured import Captured
from pipedream.capture.export import capture
from pipedream.graph.placements.placement import Mesh, device_count
from pipedream.graph.plan import Plan
from pipedream.graph.run_config import RunConfig, read_config
from pipedream.runtime.run.job import Job

MODELS: Mapping[str, tuple[tuple[int, ...], Mapping[str, Any]]] = {
    "Perceptron": ((6,), {"source": "sharded_models:points"}),
    "Gated": ((6,), {"source": "sharded_models:points"}),
    "Grouped": ((6,), {"source": "sharded_models:sentences"}),
    "Recurrent": ((6,), {"source": "sharded_models:sentences"}),
    "Recommender": ((2,), {"source": "sharded_models:pairs"}),
    "Fused": ((6,), {"source": "sharded_models:sentences"}),
    "Separate": ((6,), {"source": "sharded_models:sentences"}),
    "TiedWords": ((6,), {"source": "sharded_models:sentences"}),
    "FrozenWords": ((6,), {"source": "sharded_models:sentences"}),
    "VGG": ((3, 16, 16), {"source": "sharded_models:images", "args": {"size": 16}}),
    "resnet18": ((3, 32, 32), {"source": "sharded_models:images", "args": {"size": 32}}),
    "Convolutions": ((3, 12, 12), {"source": "sharded_models:images", "args": {"size": 12}}),
    "large_resnet18": (
        (3, 64, 64),
        {"source": "sharded_models:images", "args": {"size": 64, "examples": 22}},
    ),
}
"""The shape of an example, and the data."""
SHARDS: Mapping[str, Mapping[str, str]] = {
    "Perceptron": {"0.weight": "S(0)", "2.weight": "S(1)"},
    "Fused": {"*qkv.weight": "S(0, chunks=3)", "*up.weight": "S(0)"},
    "Separate": {"*.[qkv].weight": "S(0)", "*up.weight": "S(0)"},
    "TiedWords": {"*qkv.weight": "S(0, chunks=3)", "*up.weight": "S(0)"},
    "FrozenWords": {"*up.weight": "S(0)"},
    "VGG": {"features.0.weight": "S(0)", "classifier.0.weight": "S(0)"},
    "resnet18": {"*conv1.weight": "S(0)"},
    "Convolutions": {"*": "R"},
    "large_resnet18": {"*": "R"},
}
"""Along the last axis of a mesh."""
LANGUAGE_MODELS = ("Fused", "Separate", "TiedWords", "FrozenWords", "Grouped", "Recurrent")


@dataclass(frozen=True)
class Case:
    """A run: by stage the replicas and the mesh."""

    name: str
    replicas: Sequence[int] = (1,)
    meshes: Sequence[Mesh | None] = ((2,),)
    schedule: str = "flush"
    recompute: Collection[int] = ()
    """These stages."""
    again: int = 0
    """In other stages every so-and-so-many-th node runs again."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)
    """Placements of values, in every stage."""
    parameters: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    """By stage further placements of parameters, along all axes of its mesh."""
    machines: tuple[int, ...] = ()
    """If the ranks are in machines, with links between them that are a hundredth as fast."""


PROFILE = ["pd-profile", "run.yaml", "-o", ".", "--repeats", "2", "--shards", "none"]
"""Of models so small that half an operator takes as long as the whole: they are to be divided."""


def write_config(folder: Path, model: str, **changes: Any) -> RunConfig:
    text = {
        "format": "pipedream-run/1",
        "model": {"source": f"sharded_models:{model}"},
        "data": MODELS[model][1],
        "batch_size": 4,
        "drop_last": True,
        "microbatches": 4,
        "epochs": 1,
        "seed": 3,
        "dtype": "float64",
        "optimizer": {"name": "SGD", "args": {"lr": 0.05, "momentum": 0.9}},
        "evaluate_every": 1,
    }
    if model in LANGUAGE_MODELS:
        text["loss"] = "sharded_models:next_words"
    if model == "Recommender":
        text["loss"] = "sharded_models:clicks"
    (folder / "run.yaml").write_text(yaml.safe_dump(text | changes))
    return read_config(folder / "run.yaml")


def captured(model: str, dtype: torch.dtype = torch.float32) -> Captured:
    shape, _ = MODELS[model]
    words = model in LANGUAGE_MODELS
    x = torch.randint(0, sharded_models.WORDS, (4, *shape)) if words else torch.randn(4, *shape)
    x = x.to(dtype) if x.is_floating_point() else x
    return capture(getattr(sharded_models, model)().to(dtype), (x,))


def sharded_plan(model: str, case: Case, whole: Captured) -> Plan:
    """The stages have about as many nodes each. Ranks in order."""
    graph, stages = whole.graph, len(case.replicas)
    again = graph.order[:: case.again] if case.again else ()
    own = case.replicas, case.schedule, case.recompute, again
    made = make_plan(graph, pieces(graph, stages), *own)
    sizes = [device_count(mesh or ()) for mesh in case.meshes]
    counts = [count * size for count, size in zip(case.replicas, sizes, strict=True)]
    data = made.model_dump(exclude_none=True)
    data["cluster"]["machines"] = case.machines or (sum(counts),)
    levels = len(data["cluster"]["machines"])
    data["cluster"] |= {
        "bandwidth": tuple(1e9 / 100**level for level in range(levels)),
        "latency": (0.0,) * levels,
    }
    for stage, (planned, mesh) in enumerate(zip(data["stages"], case.meshes, strict=True)):
        first = sum(counts[:stage])
        planned["ranks"] = tuple(range(first, first + counts[stage]))
        if case.schedule == "flush":
            planned["in_flight"] = 4
        if mesh is not None:
            planned["mesh"] = mesh
            planned["placements"] = {
                "parameters": _placements(model, whole, planned["nodes"], mesh)
                | dict(case.parameters.get(stage, {})),
                "values": dict(case.values),
            }
    return Plan.model_validate(data)


def _placements(model: str, whole: Captured, nodes: Sequence[str], mesh: Mesh) -> dict[str, str]:
    """By pattern, of the parameters that the stage has."""
    names = [name for node in nodes for name in whole.parameters[node]]
    outer = "R," * (len(mesh) - 1)
    return {
        pattern: outer + text
        for pattern, text in SHARDS[model].items()
        if any(fnmatchcase(name, pattern) for name in names)
    }


def alone(case: Case) -> Case:
    """The same stages and replicas, each on one device."""
    none = [None] * len(case.replicas)
    again = case.recompute, case.again
    return Case("alone", case.replicas, none, case.schedule, *again, case.changes)


def job_of(folder: Path, model: str, case: Case, whole: Captured, **options: Any) -> Job:
    config = write_config(folder, model, **case.changes)
    plan = sharded_plan(model, case, whole)
    given = {"schedule": case.schedule, "epochs": config.epochs} | options
    job = Job(plan, config, folder, folder / case.name, **given)
    job.check()
    return job


def train_cases(folder: Path, model: str, cases: Sequence[Case]) -> None:
    """Each in a folder by its name, in the same processes."""
    whole = captured(model)
    run_jobs([job_of(folder, model, case, whole) for case in cases])
