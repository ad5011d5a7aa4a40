"""The options of `pd-profile --network`, and which other options go with it. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipedream.graph.command import UserError, option
from pipedream.graph.units import parse_bytes
from pipedream.profiler.network.levels import parse_machines

if TYPE_CHECKING:
    from pipedream.comm.rank_info import RankInfo

LARGEST = "64MB"
_SMALLEST = 900  # bytes
_FACTOR = 4
_LEAST = _FACTOR**2 * _SMALLEST
_MODEL_OPTIONS = {
    "batch_size": "--batch-size",
    "arguments": "--arg",
    "inputs": "--input",
}
NETWORK_OPTIONS = (
    option(
        "--network",
        "Measure messages, all-reduces and all-gathers between the ranks that torchrun or mpirun"
        " started, and write cluster.yaml for pd-optimize. With MODEL, sums beside its passes: what"
        " they take from each other differs from model to model.",
    ),
    option(
        "--machines N,N,...",
        "Devices per machine, number of machines, and so on for outer levels: 4,2 is 2 machines of"
        " 4 devices.  [default: the ranks of a host, then the hosts]",
    ),
    option("--largest BYTES", f"The largest message, such as 16MB.  [default: {LARGEST}]"),
)

_WARMUP, _REPEATS = 3, 10
"""Defaults for each message size."""


@dataclass(frozen=True)
class Effort:
    """The largest message in bytes, and the warm-up and repeats of each message size."""

    largest: int
    warmup: int
    repeats: int

    @property
    def sizes(self) -> list[int]:
        """Returns the bytes of the messages: multiples of four, each about four times the last."""
        sizes = [self.largest // 4 * 4]
        while sizes[0] >= _FACTOR * _SMALLEST:
            sizes.insert(0, sizes[0] // _FACTOR // 4 * 4)
        return sizes


@dataclass(frozen=True)
class NetworkOptions:
    """`machines`: components of each level, innermost first; None for what the host names say.
    `device` is cpu or cuda; `model` the one beside whose passes to measure sums, if any.
    """

    output: Path
    machines: tuple[int, ...] | None
    device: str
    threads: int
    effort: Effort
    model: str | None = None


def check_no_network_options(parameters: Mapping[str, Any]) -> None:
    """Raises UserError for options that need --network."""
    for each in NETWORK_OPTIONS[1:]:
        if parameters[each.name or ""] is not None:
            raise UserError(
                f"{each.opts[0]} goes with --network: add it, or leave {each.opts[0]} out"
            )


def network_options(parameters: Mapping[str, Any], rank_info: RankInfo | None) -> NetworkOptions:
    """Returns the options among the parameters, checked for these ranks. Raises UserError."""
    for name in ("meta", "batch_sizes", "sequence"):
        if parameters[name]:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} does not go with --network: leave it out")
    if parameters["model"] is None:
        for name, flag in _MODEL_OPTIONS.items():
            if parameters[name]:
                raise UserError(f"{flag} is for a MODEL: name one, or leave {flag} out")
    device, machines = parameters["device"], parameters["machines"]
    if device not in ("cpu", "cuda"):
        raise UserError(f"--device {device}: with --network write cpu, or cuda for a GPU each")
    if rank_info is None or rank_info.world_size < 2:
        reason = "this is the only process" if rank_info is None else "only one rank was started"
        raise UserError(
            f"--network measures between ranks, and {reason}: start several, such as torchrun "
            "--standalone --nproc-per-node=2 --no-python pd-profile --network -o runs/network"
        )
    return NetworkOptions(
        parameters["output"],
        None if machines is None else parse_machines(machines, rank_info.world_size),
        device,
        parameters["threads"],
        Effort(
            _largest(parameters["largest"]),
            parameters["warmup"] or _WARMUP,
            parameters["repeats"] or _REPEATS,
        ),
        parameters["model"],
    )


def _largest(text: str | None) -> int:
    try:
        largest = parse_bytes(text or LARGEST)
    except ValueError as error:
        raise UserError(f"--largest: {error}") from None
    if not _LEAST <= largest <= 1e12:
        raise UserError(f"--largest {text}: give from {_LEAST / 1000:g}kB, for three sizes, to 1TB")
    return int(largest)
