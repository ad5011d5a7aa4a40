"""Clusters by name: `dgx-h100:4` are four such machines. What vendors publish, less what protocols
take of it; `pd-profile --network` measures a real one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches

from pipedream.graph.cluster import Cluster, DeviceType
from pipedream.graph.errors import UserError

_GIGABIT = 1e9 / 8
_CARRIED = (0.8, 0.9)
"""The parts of a link's bandwidth that sums of large tensors get, inside a machine and between two:
all-reduces of nccl-tests move 360 GB/s among the eight H100s of a machine, and about as much over
eight adapters of 400 Gbit/s.
"""
_LATENCY = (3e-6, 10e-6)
"""Seconds of a message, or of a step of a ring."""
_NAME = re.compile(r"([a-z][a-z0-9-]*):([1-9][0-9]*)")


@dataclass(frozen=True)
class Machine:
    """A machine with eight devices. `memory`: bytes of each; `inside`: bytes per second of each to
    the others, in one direction; `outside`: those of all adapters of the machine together.
    """

    device: str
    memory: float
    inside: float
    outside: float


MACHINES = {
    # NVLink of the third generation, eight adapters of 200 Gbit/s (DGX A100 datasheet).
    "dgx-a100": Machine("a100", 80e9, 300e9, 8 * 200 * _GIGABIT),
    # Fourth generation, eight of 400 Gbit/s (DGX H100 and H200 datasheets).
    "dgx-h100": Machine("h100", 80e9, 450e9, 8 * 400 * _GIGABIT),
    "dgx-h200": Machine("h200", 141e9, 450e9, 8 * 400 * _GIGABIT),
    # Fifth generation (DGX B200 datasheet).
    "dgx-b200": Machine("b200", 180e9, 900e9, 8 * 400 * _GIGABIT),
    # Seven links of Infinity Fabric at 64 GB/s (Instinct MI300X platform data sheet).
    "mi300x": Machine("mi300x", 192e9, 448e9, 8 * 400 * _GIGABIT),
    # PCI Express 4.0 x16, two adapters of 200 Gbit/s.
    "l40s": Machine("l40s", 48e9, 32e9, 2 * 200 * _GIGABIT),
}


def preset(text: str) -> Cluster | None:
    """Returns the cluster that text such as `dgx-h100:4` names; None if it has not that form.
    Raises UserError for a name that is not known.
    """
    match = _NAME.fullmatch(text)
    if match is None:
        return None
    name, count = match[1], int(match[2])
    if name not in MACHINES:
        likely = get_close_matches(name, MACHINES, n=1) or sorted(MACHINES)
        raise UserError(f"--cluster {text}: there is no machine {name}: name {' or '.join(likely)}")
    machine = MACHINES[name]
    bandwidths = machine.inside * _CARRIED[0], machine.outside * _CARRIED[1]
    counts = (8, count) if count > 1 else (8,)
    return Cluster(
        machines=counts,
        bandwidth=bandwidths[: len(counts)],
        latency=_LATENCY[: len(counts)],
        names=("device", "machine")[: len(counts)],
        kinds=(DeviceType(name=machine.device, memory=machine.memory),),
        machine_kinds=(machine.device,) * counts[-1],
    )
