"""How long the best sharding of a model takes to find, and what it is worth.

    python scripts/bench/meshes/shardings.py trace MODEL FOLDER 4096:int64:32000 [batch_size=1]
    python scripts/bench/meshes/shardings.py solve FOLDER 8,8 [SECONDS_PER_BYTE]
    python scripts/bench/meshes/shardings.py distances 2,4 FOLDER...
    python scripts/bench/meshes/shardings.py timed FOLDER...
    python scripts/bench/meshes/shardings.py halve FOLDER 12

MODEL and its inputs are given as to pd-profile.
`trace` captures the model without data (meta device) and writes operators.json, with seconds that
follow from each operator's flops and bytes. `solve` reads it and finds the best sharding on a mesh,
with its proof, in a process of its own: what it prints last is what the whole of it took. `tied`:
seconds of the best one that is the same for all equal layers. `distances`: by how much the quick
searches miss the best one; `propagate` is told where that has the parameters, and how it divides
the operators that read the inputs. `timed`: what part of the seconds that devices compute, in the
best sharding on each of a few meshes, is of parts of operators that pd-profile has timed. `halve`:
what the recursive search takes for 2^12 devices, all halvings free, once the graph is read and
after.
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


def stage_of(profile: Any, mesh: tuple[int, ...], price: float = 0.0) -> Any:
    from pipedream.graph.cluster import Link
    from pipedream.optimizer.intra.costs import Accounting, StageProblem
    from pipedream.sharding.assignment import LinkedMesh

    links = (Link(latency=2e-5, bandwidth=25e9), Link(latency=5e-6, bandwidth=200e9))
    linked = LinkedMesh(mesh, links[-len(mesh) :])
    return StageProblem(
        *(profile.graph, linked, profile.seconds, profile.graph.backward_calls()),
        Accounting(minibatches=8, parameter_seconds=price),
    )


def distances(mesh: tuple[int, ...], folders: list[Path]) -> None:
    from dataclasses import replace
    from functools import partial

    from pipedream.graph.placements.operators import read_operators
    from pipedream.graph.placements.requests import Requests
    from pipedream.optimizer.intra.cones import cones
    from pipedream.optimizer.intra.solver.exact import solve as solved
    from pipedream.optimizer.recursive.search import recursive
    from pipedream.sharding.propagate import propagate

    print("model | operators | one device | best | cones | recursive | propagate | seconds to find")
    for folder in folders:
        profile = read_operators(folder / "operators.json")
        stage = stage_of(profile, mesh)
        graph, linked, seconds = profile.graph, stage.mesh, profile.seconds
        began = time.perf_counter()
        choice = solved(stage.problem)
        took = [time.perf_counter() - began]
        best = stage.assignment(choice.labels)
        placed = best.placed_inputs.items()
        given = {each.value for each in graph.inputs if each.role == "input"}
        first = [call for call in graph.calls if given.intersection(call.reads)]
        told = Requests(
            {name: its for (role, name), its in placed if role == "parameter"},
            operators={each.name: best.targets(each.name)[: len(each.reads)] for each in first},
        )
        figures = []
        began = time.perf_counter()
        joined = cones(stage.problem)
        of_cones = solved(joined.problem)
        took.append(time.perf_counter() - began)
        figures.append(stage.problem.amounts(joined.expanded(of_cones.labels)).seconds)
        for search in (
            partial(recursive, graph, linked, None, seconds, stage.accounting.minibatches),
            partial(propagate, graph, linked, told, seconds),
        ):
            began = time.perf_counter()
            found = search()
            took.append(time.perf_counter() - began)
            figures.append(replace(stage, requests=Requests()).seconds_of(found))
        whole = math.fsum(seconds.values())
        print(
            f"{folder.name} | {len(graph.calls)} | {whole * 1e3:.2f} ms | "
            f"{choice.seconds * 1e3:.2f} ms{'' if choice.proven else ' (not proven)'} | "
            + " | ".join(f"{each / choice.seconds - 1:+.1%}" for each in figures)
            + " | "
            + ", ".join(f"{each:.2f}" for each in took),
            flush=True,
        )


def timed(folders: list[Path]) -> None:
    from pipedream.graph.placements.operators import read_operators
    from pipedream.optimizer.intra.solver.exact import solve as solved
    from pipedream.sharding.local_times import LocalTimes

    meshes = ((2,), (4,), (2, 2), (8,), (2, 4), (4, 4), (8, 8))
    print("model | timed | " + " | ".join(" x ".join(map(str, mesh)) for mesh in meshes))
    for folder in folders:
        profile = read_operators(folder / "operators.json")
        times, shares = LocalTimes.of(profile.local_seconds), []
        for mesh in meshes:
            stage, seconds = stage_of(profile, mesh), {True: 0.0, False: 0.0}
            chosen = stage.assignment(solved(stage.problem).labels).strategies
            for call in profile.graph.calls:
                way = call.operator, chosen[call.name], mesh
                seconds[times.is_timed(*way)] += profile.seconds[call.name] * times.share(*way)
            shares.append(f"{seconds[True] / sum(seconds.values()):.1%}")
        print(f"{folder.name} | {len(profile.local_seconds)} | " + " | ".join(shares), flush=True)


def halve(folder: Path, halvings: int) -> None:
    from pipedream.graph.cluster import Link
    from pipedream.graph.placements.operators import read_operators
    from pipedream.optimizer.recursive.search import RecursiveSearch
    from pipedream.sharding.assignment import LinkedMesh

    gc.set_threshold(200_000)
    profile = read_operators(folder / "operators.json")
    links = [Link(latency=2e-5, bandwidth=25e9 if k < 9 else 200e9) for k in range(halvings)]
    mesh = LinkedMesh((2,) * halvings, tuple(links))
    for what in ("the first time", *["again, of a graph just read"] * 5):
        graph = profile.graph.model_copy()
        began = time.perf_counter()
        search = RecursiveSearch(graph)
        search.run(mesh, None, profile.seconds)
        first = time.perf_counter() - began
        began = time.perf_counter()
        search.run(mesh, None, profile.seconds)
        kept = time.perf_counter() - began
        print(f"{what}: {first * 1e3:.1f} ms; what is known kept: {kept * 1e3:.1f} ms")


def solve(folder: Path, mesh: tuple[int, ...], price: float = 0.0) -> None:
    from pipedream.graph.placements.operators import read_operators
    from pipedream.optimizer.intra.solver.exact import solve as solved

    gc.set_threshold(200_000)  # as pd-optimize does
    profile = read_operators(folder / "operators.json")
    read = time.perf_counter() - BEGAN
    stage = stage_of(profile, mesh, price)
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
    if words[0] == "distances":
        distances(tuple(map(int, words[1].split(","))), [Path(each) for each in words[2:]])
        return
    if words[0] == "timed":
        timed([Path(each) for each in words[1:]])
        return
    if words[0] == "halve":
        halve(Path(words[1]), int(words[2]))
        return
    args = dict(word.split("=", 1) for word in words[3:] if "=" in word)
    inputs = tuple(word for word in words[3:] if "=" not in word)
    trace(words[1], Path(words[2]), inputs, {name: json.loads(own) for name, own in args.items()})


if __name__ == "__main__":
    main(sys.argv[1:])
