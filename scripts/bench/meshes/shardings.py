"""How long the best sharding of a model takes to find, and what it is worth.

    python scripts/bench/meshes/shardings.py trace MODEL FOLDER 4096:int64:32000 [batch_size=1]
    python scripts/bench/meshes/shardings.py solve FOLDER 8,8 [SECONDS_PER_BYTE]

MODEL and its inputs are given as to pd-profile.
`trace` captures the model without data (meta device) and writes operators.json, with seconds that
follow from each operator's flops and bytes. `solve` reads it and finds the best sharding on a mesh,
with its proof, in a process of its own: what it prints last is what the whole of it took. `tied`:
seconds of the best one that is the same for all equal layers.
"""

from __future__ import annotations

import gc
import json
import math
import resource
import sys
import time
from pathlib import Path
from typing import Any

BEGAN = time.perf_counter()
FLOPS, BANDWIDTH = 150e12, 1.5e12
"""Of a device: matrix products per second in flops, and bytes of memory per second."""

VIEWS = ("view", "t", "transpose", "expand", "_unsafe_view", "split", "unsqueeze", "permute")


def trace(model: str, folder: Path, inputs: tuple[str, ...], args: dict[str, Any]) -> None:
    import torch

    from pipedream.capture.captured import flatten_inputs
    from pipedream.capture.compute_settings import Precision
    from pipedream.capture.fake_tensors import capture_fake
    from pipedream.capture.programs.attribution import attribute
    from pipedream.capture.sources.load import load
    from pipedream.graph.placements.operators import OperatorProfile

    size = int(args.pop("batch_size", 1))
    loaded = load(model, args, size, inputs, True)
    device = torch.device("cpu")
    precision = Precision(loaded.autocast, device)
    captured = capture_fake(loaded.model, loaded.args, loaded.kwargs, precision=precision)
    print(f"captured after {time.perf_counter() - BEGAN:.1f} s")
    given = flatten_inputs(loaded.args, loaded.kwargs)
    found = attribute(captured, given, device, precision.computing())
    seconds = {call.name: _seconds(call.operator) for call in found.graph.calls}
    profile = OperatorProfile(
        fingerprint=captured.graph.fingerprint,
        batch_size=size,
        graph=found.graph,
        nodes=dict(found.nodes),
        seconds=seconds,
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "operators.json").write_text(profile.model_dump_json())
    print(f"traced {len(found.graph.calls)} operators in {time.perf_counter() - BEGAN:.1f} s")


def _seconds(operator: Any) -> float:
    from pipedream.graph.placements.operators import flops

    moved = sum(each.bytes for each in (*operator.inputs, *operator.outputs) if each is not None)
    if operator.family.removeprefix("aten.") in VIEWS:
        moved = 0
    return float(max(flops(operator) / FLOPS, moved / BANDWIDTH))


def solve(folder: Path, mesh: tuple[int, ...], price: float = 0.0) -> None:
    from pipedream.graph.cluster import Link
    from pipedream.graph.placements.operators import read_operators
    from pipedream.optimizer.intra.costs import Accounting, StageProblem
    from pipedream.optimizer.intra.exact import solve as solved
    from pipedream.sharding.assignment import LinkedMesh

    gc.set_threshold(200_000)  # as pd-optimize does
    profile = read_operators(folder / "operators.json")
    read = time.perf_counter() - BEGAN
    links = (Link(latency=2e-5, bandwidth=25e9), Link(latency=5e-6, bandwidth=200e9))
    linked = LinkedMesh(mesh, links[-len(mesh) :])
    stage = StageProblem(
        *(profile.graph, linked, profile.seconds, profile.graph.backward_calls()),
        Accounting(minibatches=8, parameter_seconds=price),
    )
    problem = stage.problem
    built = time.perf_counter() - BEGAN
    choice = solved(problem)
    print(
        json.dumps(
            {
                "labels": sum(map(len, problem.seconds)),
                "choices": len(problem.seconds),
                "read": round(read, 2),
                "built": round(built - read, 2),
                "solved": round(time.perf_counter() - BEGAN - built, 2),
                "seconds": choice.seconds,
                "bound": choice.bound,
                "proven": choice.proven,
                "tied": choice.tied and choice.tied.seconds,
                "tied_proven": choice.tied and choice.tied.proven,
                "whole": math.fsum(profile.seconds.values()),
                "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
                "process": round(time.perf_counter() - BEGAN, 2),
            }
        )
    )


def main(words: list[str]) -> None:
    if words[0] == "solve":
        mesh = tuple(map(int, words[2].split(",")))
        solve(Path(words[1]), mesh, float(words[3]) if len(words) > 3 else 0.0)
        return
    args = dict(word.split("=", 1) for word in words[3:] if "=" in word)
    inputs = tuple(word for word in words[3:] if "=" not in word)
    trace(words[1], Path(words[2]), inputs, {name: json.loads(own) for name, own in args.items()})


if __name__ == "__main__":
    main(sys.argv[1:])
