"""The cluster that the options name: in a file, in short form, or that of a plan or a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import ValidationError

from pipedream.graph.cluster import Cluster, DeviceType, read_cluster
from pipedream.graph.errors import UserError
from pipedream.graph.plan import Plan, read_plan
from pipedream.graph.units import parse_bytes, parse_seconds
from pipedream.optimizer.calibrate.runs import CalibrationRun
from pipedream.optimizer.cli.inputs import any_profile, graph_of
from pipedream.optimizer.cli.like import remaining
from pipedream.optimizer.cli.measure_here import cluster_here, workers_here
from pipedream.optimizer.cli.options import Options
from pipedream.optimizer.cli.presets import preset

AUTO = Path("auto")
"""Typed in place of a cluster file: this machine."""

_MOST_DEVICES = 100_000
"""The most devices accepted: planning needs time and memory for each."""

_FEWEST_BYTES = 1_000
"""A number of fewer, without a unit, was meant otherwise."""


def cluster_of(options: Options) -> Cluster:
    """The cluster to plan for. Raises UserError."""
    file, machines, bandwidth = options.cluster, options.machines, options.bandwidth
    short: dict[str, object] = {"--machines": machines, "--bandwidth": bandwidth}
    short |= {"--latency": options.latency, "--speed": options.speed}
    from_run = bool(options.calibrate) and not any((file, *short.values()))
    here = options.like is None and file == AUTO
    if options.workers is not None and options.like is None and not from_run and not here:
        raise UserError(
            "--workers needs --like PLAN, --calibrate RUN or --cluster auto: add one of these, or"
            " give --machines and --bandwidth"
        )
    if options.like is not None:
        others = {"--cluster": file, **short, "--calibrate": options.calibrate or None}
        _only("--like", options.like, others)
        cluster = _like(read_plan(options.like), options.like, options.workers)
    elif from_run:
        newest = CalibrationRun.read(options.calibrate[-1])
        cluster = _like(newest.measured.plan, newest.folder, options.workers)
    elif here:
        _only("--cluster", AUTO, short)
        cluster = _measured_here(options)
    elif file is not None:
        _only("--cluster", file, short)
        named_machines = None if file.exists() else preset(str(file))
        cluster = read_cluster(file) if named_machines is None else named_machines
    elif machines is None or bandwidth is None:
        missing = "--machines" if machines is None else "--bandwidth"
        raise UserError(
            f"Missing option '{missing}': give --machines and --bandwidth, or --cluster FILE"
        )
    else:
        cluster = _of_speed(_short_cluster(machines, bandwidth, options.latency), options.speed)
    if cluster.devices > _MOST_DEVICES:
        raise UserError(f"{named(options)}: give at most {_MOST_DEVICES:,} devices in all")
    return cluster


def _measured_here(options: Options) -> Cluster:
    """Measures the workers of this machine. Raises UserError."""
    graph_of(options)  # what is wrong with it is said before measuring takes a minute
    profile = any_profile(options)
    machine = None if profile is None else profile.machine
    device = "cpu" if machine is None or machine.device == "cpu" else "cuda"
    folder = None if options.output is None else options.output / "network"
    return cluster_here(options.workers or workers_here(machine), device, folder)


def _only(option: str, file: Path, others: Mapping[str, object]) -> None:
    for other, value in others.items():
        if value is not None:
            raise UserError(
                f"{option} {file} and {other} both say what the cluster is: give one of them"
            )


def _like(plan: Plan, path: Path, workers: int | None) -> Cluster:
    """Returns the cluster of the plan from `path`, or what `workers` of its devices make."""
    cluster = plan.cluster
    if workers is not None and workers > cluster.devices:
        raise UserError(f"--workers {workers}: the cluster of {path} has {cluster.devices} devices")
    return cluster if workers is None else remaining(cluster, workers)


def named(options: Options) -> str:
    """The option that names the cluster, as it was typed."""
    if options.like is not None:
        return f"--like {options.like}"
    if options.calibrate and options.machines is None and options.cluster is None:
        return f"--calibrate {options.calibrate[-1]}"
    if options.cluster is None:
        return f"--machines {options.machines}"
    return f"--cluster {options.cluster}"


def _short_cluster(machines: str, bandwidth: str, latency: str | None) -> Cluster:
    try:
        counts = tuple(map(int, machines.split(",")))
    except ValueError:
        raise UserError(f"--machines {machines}: give whole numbers, such as 4,2") from None
    speeds = tuple(bytes_of("--bandwidth", speed) for speed in bandwidth.split(","))
    typed = latency.split(",") if latency else ()
    delays = tuple(_parsed("--latency", delay, parse_seconds) for delay in typed)
    try:
        return Cluster(machines=counts, bandwidth=speeds, latency=delays)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        also = "" if latency is None else f" --latency {latency}"
        raise UserError(f"--machines {machines} --bandwidth {bandwidth}{also}: {reason}") from None


def _of_speed(cluster: Cluster, speed: float | None) -> Cluster:
    if speed is None or speed == 1:
        return cluster
    kind = DeviceType(name="device", speed=speed)
    names = (kind.name,) * cluster.machines[-1]
    return cluster.model_copy(update={"kinds": (kind,), "machine_kinds": names})


def bytes_of(option: str, text: str) -> float:
    """The bytes typed for the option. Raises UserError, also for a number that lacks its unit."""
    amount = _parsed(option, text, parse_bytes)
    if amount < _FEWEST_BYTES and text.strip().replace(".", "").isdecimal():
        raise UserError(f"{option} {text} is {text} bytes: add a unit, such as {text.strip()}GB")
    return amount


def _parsed(option: str, text: str, parse: Callable[[str], float]) -> float:
    try:
        return parse(text)
    except ValueError as error:
        raise UserError(f"{option}: {error}") from None
