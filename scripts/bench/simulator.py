"""Is a pipeline as fast as the simulator says? `python scripts/bench/simulator.py [FOLDER]`.

On this machine, on two processes of one thread each: profiles a GPT with pd-profile, measures gloo
and the optimizer's step, makes six plans good and bad, and trains each with pd-train, thrice in
turns. Prints for each plan its closed form, simulated and measured (the median of three) seconds
per minibatch, then the rank correlation and the median error, for the median and for the least of
the three. A measurement during which other processes had more than a twentieth of a core is made
again, up to five times in all. Takes three minutes on an idle machine.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import yaml

from pipedream.capture.captured import Value
from pipedream.capture.sources.load import load_config_model
from pipedream.comm.transport import Transport
from pipedream.graph.choices import ScheduleName
from pipedream.graph.cluster import Cluster, Link
from pipedream.graph.model import Graph, read_graph
from pipedream.graph.plan import Plan, write_plan
from pipedream.graph.run_config import read_config
from pipedream.graph.units import show_bytes, show_seconds
from pipedream.optimizer.cost.models import MeasuredCost
from pipedream.optimizer.search.outcome import fixed_outcome
from pipedream.optimizer.search.request import Request
from pipedream.optimizer.simulate.simulator import simulate_plan
from pipedream.runtime.optim.optimizers import make_optimizer
from pipedream.runtime.optim.weights import Weights
from pipedream.runtime.report.recording import read_trace
from pipedream.schedule.action import Kind
from pipedream.schedule.channel import Channel

Measurement = TypeVar("Measurement")

CONFIGS = Path(__file__).parents[2] / "configs"
REPEATS = 30
TRIES, OTHERS, ROUNDS = 5, 0.05, 3
FILLING, ROUND = 4, 4
"""Backward passes of rank 0 before the steady state, and over how many a span is taken: a flush."""

SIZES = (4_096, 65_536, 262_144, 1_048_576, 4_194_304, 16_777_216)

RUN = {
    "format": "pipedream-run/1",
    "model": {
        "source": "topics_gpt:model",
        "args": {"length": 64, "width": 256, "layers": 4, "dropout": 0.0},
    },
    "data": {"source": "topics_gpt:data", "args": {"length": 64, "held_out": 0.955}},
    "loss": "topics_gpt:loss",
    "optimizer": {"name": "AdamW", "args": {"lr": 0.001}},
    "batch_size": 8,
    "microbatches": 4,
    "epochs": 1,
    "seed": 0,
}

PLANS: dict[str, tuple[float | None, ScheduleName]] = {
    "halves": (0.5, "weight-stashing"),
    "two replicas": (None, "weight-stashing"),
    "a third first": (0.34, "weight-stashing"),
    "halves, flush": (0.5, "flush"),
    "a fifth last": (0.8, "weight-stashing"),
    "nearly all last": (0.06, "weight-stashing"),
}
"""What share of the time the first stage has, None for two replicas of all; the schedule."""


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="bench-"))
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = str(CONFIGS)
    os.environ["OMP_NUM_THREADS"] = "1"
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(RUN))
    profile = folder / "profile"
    _, others = undisturbed(
        lambda: call("pd-profile", config, "-o", profile, "--repeats", "30", "--warmup", "5")
    )
    print(f"profiled; other processes had {others:.0%} of a core", flush=True)
    graph = read_graph(profile / "graph.txt")
    cluster = measure_network(folder)
    rate = update_rate(config)
    compute = sum(node.compute_seconds for node in graph.nodes.values())
    parameters = sum(node.parameter_bytes for node in graph.nodes.values())
    print(f"model: {show_seconds(compute)}, parameters {show_bytes(parameters)}")
    print(f"optimizer: {show_bytes(rate)} of parameters in a second")
    print("messages:", *(f"{show_bytes(b)} {show_seconds(s)}," for b, s in cluster.send[0].points))
    rings = cluster.all_reduce[0].points
    print("all-reduce:", *(f"{show_bytes(b)} {show_seconds(s)}," for b, s in rings), flush=True)
    plans = {name: make_plan(graph, cluster, *how) for name, how in PLANS.items()}
    simulated = {name: simulate_plan(plan, graph, update_rate=rate) for name, plan in plans.items()}
    runs: dict[str, list[float]] = {name: [] for name in PLANS}
    for turn in range(ROUNDS):  # in turns: what slows the machine for a while slows them all
        for name, plan in plans.items():
            simulation = simulated[name]
            assert simulation is not None
            run = folder / f"{name.replace(' ', '-').replace(',', '')}-{turn}"
            took, others = undisturbed(partial(train, simulation.noted_in(plan), config, run))
            runs[name].append(took)
            print(f"{name}: {took:.4f} s, others {others:.1%} of a core", flush=True)
    rows = []
    for name, plan in plans.items():
        simulation, measured = simulated[name], statistics.median(runs[name])
        assert simulation is not None
        rows.append(
            {
                "plan": name,
                "closed": plan.predicted.seconds_per_minibatch,
                "simulated": simulation.seconds_per_minibatch,
                "measured": measured,
                "least": min(runs[name]),
                "most": max(runs[name]),
                "error": simulation.seconds_per_minibatch / measured - 1,
            }
        )
    frame = pd.DataFrame(rows)
    frame.to_csv(folder / "bench_simulator.csv", index=False)
    print(frame.to_string(index=False, float_format="%.4f"))
    for column in ("measured", "least"):  # a disturbance only ever adds time
        correlation = frame.simulated.corr(frame[column], method="spearman")
        error = (frame.simulated / frame[column] - 1).abs().median()
        print(f"{column}: rank correlation {correlation:.2f}, median error {error:.1%}")


def undisturbed(measure: Callable[[], Measurement]) -> tuple[Measurement, float]:
    """What it measures, and how many cores other processes had meanwhile: as few as can be had."""
    tries = []
    for _ in range(TRIES):
        begin, busy, own = time.perf_counter(), busy_seconds(), own_seconds()
        found = measure()
        others = busy_seconds() - busy - (own_seconds() - own)
        tries.append((max(0.0, others / (time.perf_counter() - begin)), found))
        if tries[-1][0] < OTHERS:
            break
    others, found = min(tries, key=lambda pair: pair[0])
    return found, others


def busy_seconds() -> float:
    """Of all cores since the machine was started; what the host took away counts as busy."""
    fields = Path("/proc/stat").read_text().split()[1:9]
    user, nice, system, _, _, interrupts, soft, steal = map(int, fields)
    ticks = user + nice + system + interrupts + soft + steal
    return ticks / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """Of this process and of the children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def call(program: str, *arguments: object) -> None:
    command = [Path(sys.executable).with_name(program), *map(str, arguments)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def make_plan(graph: Graph, cluster: Cluster, share: float | None, schedule: ScheduleName) -> Plan:
    """Two stages of which the first has `share` of the time, or one of two replicas."""
    request = Request(graph, cluster, MeasuredCost(), schedule)
    planning = request.planning
    if share is None:
        return fixed_outcome(request, [len(planning)], [2]).plan
    before = np.cumsum(planning.compute_seconds) / planning.compute_seconds.sum()
    first = int(np.abs(before - share).argmin()) + 1
    return fixed_outcome(request, [first, len(planning)], [1, 1]).plan


def train(plan: Plan, config: Path, folder: Path) -> float:
    """Measured seconds per minibatch in the steady state: the median over a few of them."""
    folder.mkdir(exist_ok=True)
    shutil.rmtree(folder / "run", ignore_errors=True)
    write_plan(plan, folder / "plan.json")
    call(
        "pd-train", folder / "plan.json", "--config", config, "-o", folder / "run", "--no-evaluate"
    )
    events = read_trace(folder / "run/timeline.csv")[0]
    ends = [event.end for event in events if event.action.kind == Kind.BACKWARD][FILLING:]
    spans = [late - early for early, late in zip(ends, ends[ROUND:], strict=False)]
    return statistics.median(spans) / ROUND / plan.replicas[0]


def update_rate(config: Path) -> float:
    """Bytes of parameters per second in an update that keeps the older version."""
    torch.set_num_threads(1)
    run = read_config(config)
    sys.path.insert(0, str(CONFIGS))
    parameters = dict(load_config_model(run, config.parent).named_parameters())
    weights = Weights(parameters)
    optimizer = make_optimizer(run.optimizer, parameters)
    times = []
    weights.expect(dict.fromkeys(range(REPEATS), 1))
    for number in range(REPEATS):
        version = weights.acquire(number)
        weights.gradients = {name: torch.randn_like(p) for name, p in parameters.items()}
        begin = time.perf_counter()
        weights.update(optimizer.step, 1)
        times.append(time.perf_counter() - begin)
        weights.release(version)
    return sum(p.nbytes for p in parameters.values()) / statistics.median(times)


def measure_network(folder: Path) -> Cluster:
    """Two processes of this machine, with the links between them as pd-train uses them."""
    mp.spawn(_measure, (str(folder),), nprocs=2)
    sends, rings = json.loads((folder / "network.json").read_text())
    link, ring = (Link(points=_rising(points)) for points in (sends, rings))
    (few, soon), (many, late) = link.points[-2:]
    bandwidth = (many - few) / (late - soon)
    return Cluster(machines=(2,), bandwidth=(bandwidth,), send=(link,), all_reduce=(ring,))


def _rising(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """More bytes never take less time; where noise says so, the larger time stands."""
    sizes, seconds = zip(*points, strict=True)
    return tuple(zip(sizes, itertools.accumulate(seconds, max), strict=True))


def _measure(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store-{os.getppid()}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    transport = Transport(torch.device("cpu"), "gloo")
    sends = [(size, statistics.median(_ping(transport, rank, size))) for size in SIZES]
    rings = [(size, statistics.median(_reduce(transport, size))) for size in SIZES]
    if rank == 0:
        (Path(folder) / "network.json").write_text(json.dumps([sends, rings]))
    transport.drain()
    dist.destroy_process_group()


def _ping(transport: Transport, rank: int, size: int) -> list[float]:
    """Seconds one way: half of there and back."""
    values = (Value("x", "x", (size // 4,), torch.float32, False),)
    there, back = Channel(0, 1, (0, 1)), Channel(1, 0, (0, 1), is_gradient=True)
    sends, receives = (there, back) if rank == 0 else (back, there)
    tensor = torch.zeros(size // 4)
    times = []
    for _ in range(REPEATS):
        transport.post({receives: values})
        transport.barrier()
        begin = time.perf_counter()
        if rank == 0:
            transport.send({sends: [tensor]})
        (got,) = transport.receive(receives)
        if rank == 1:
            transport.send({sends: [got]})
        times.append((time.perf_counter() - begin) / 2)
    return times


def _reduce(transport: Transport, size: int) -> list[float]:
    tensor = torch.zeros(size // 4)
    times = []
    for _ in range(REPEATS):
        transport.barrier()
        begin = time.perf_counter()
        transport.add_up([tensor], None)
        times.append(time.perf_counter() - begin)
    return times


if __name__ == "__main__":
    main()
