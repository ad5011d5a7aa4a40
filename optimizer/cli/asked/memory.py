"""What a device has for the model, and how that may be made to suffice."""

from __future__ import annotations

from pipedream.graph.choices import Zero
from pipedream.graph.cluster import Cluster
from pipedream.graph.errors import UserError
from pipedream.graph.profile import Profile, ProfiledProcess
from pipedream.graph.units import show_bytes
from pipedream.optimizer.cli.asked.corrections import whole_state_option
from pipedream.optimizer.cli.cluster_options import bytes_of
from pipedream.optimizer.cli.options import Options
from pipedream.optimizer.cost.memory import ROOM_ON_GPU
from pipedream.optimizer.search.request import Request

_OTHER_KIND = 10
"""Devices so many times as fast as the one profiled, or as slow, are of another kind: what was
measured of its allocator is not true of theirs.
"""


def room_of(options: Options, profile: Profile | None, cluster: Cluster) -> float:
    """Returns the bytes of a device that are not the model's. Raises UserError."""
    if options.room is not None:
        return 0.0 if options.room == "0" else bytes_of("--room", options.room)
    process = process_of(profile, cluster)
    if process is not None:
        return process.baseline_bytes
    return 0.0 if profile is None or profile.machine.device == "cpu" else ROOM_ON_GPU


def process_of(profile: Profile | None, cluster: Cluster) -> ProfiledProcess | None:
    """Returns what a process of the profiled machine holds, if devices are of its kind."""
    alike = all(1 / _OTHER_KIND < kind.speed < _OTHER_KIND for kind in cluster.kinds)
    return profile.process if profile is not None and alike else None


def host_bandwidth_of(options: Options, profile: Profile | None) -> float | None:
    """Returns the bytes per second between a device and its host, each way, over which activations
    may be moved: by default those of an estimated profile. None if they stay. Raises UserError.
    """
    if options.host_bandwidth == "0":
        return None
    if options.host_bandwidth is not None:
        return bytes_of("--host-bandwidth", options.host_bandwidth)
    estimated = None if profile is None else profile.estimated
    return None if estimated is None else estimated.host_bandwidth


def zero_of(options: Options) -> Zero:
    """Returns whether replicas may divide the optimizer's state. Raises UserError."""
    if options.optimizer == "muon":
        if options.zero == "always":
            raise UserError(
                "--zero always: replicas update parts of parameters, and muon has to see whole"
                " matrices: leave --zero out, or give --optimizer adam"
            )
        return "never"
    needing = whole_state_option(options)
    if needing is None:
        return options.zero
    if options.zero == "always":
        raise UserError(
            "--zero always: replicas that divide updates know the optimizer's state of their parts"
            f" alone, and {needing} needs all of it: leave {needing} or --zero out"
        )
    return "never"


def check_room(request: Request) -> None:
    """Raises UserError if a device has no bytes for the model."""
    if request.device_types.smallest_memory <= 0:
        raise UserError(
            f"--room {show_bytes(request.room)}: a device has no more memory than that, which is"
            f" for {request.room_for}: give more --memory or less --room"
        )
