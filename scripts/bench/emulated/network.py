"""The network of a cluster on one machine: a network namespace per device, links with a rate.

Devices and switches are namespaces without names, held open by this process alone: when it ends, by
whatever signal, Linux removes them with all that is in them. A link is a veth pair, slowed down at
both ends: a device has one port out and one port in, as in pipedream.optimizer.cost.network. A
machine of several devices is a switch, whose uplink leads to the switch between the machines.

A port shares its rate evenly among the connections that want it, packet by packet, and gives each a
queue of its own (HTB and a hash: not every kernel has sfq). No packet is lost: a connection has
fewer bytes under way than its queue holds. So short messages do not wait behind long ones of other
connections, and rates are max-min fair. Acknowledgements have a queue, too: behind the data that a
connection sends the other way, they would make it as slow in one direction as it is in the other.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pipedream.graph.cluster import Cluster
from pipedream.graph.errors import UserError

PORT = "port"
"""A device's network interface."""

MTU = 1500
"""Bytes of a full packet: 0.6 ms at 2.5 MB/s."""
_FRAME = MTU + 14
"""The same with its Ethernet header."""
ON_THE_WIRE = _FRAME / (MTU - 52)
"""Bytes of a full packet with its Ethernet, IP and TCP headers, over those of its payload."""
BURST = 3 * MTU
"""Bytes that an idle port sends at once, so that a timer may be a little late."""
FLOWS = 256
"""Queues of a port: a power of two. Connections are hashed to them."""
QUEUE = 256 * 1024
"""Bytes that a queue holds."""
SEND_BUFFER = 128 * 1024
"""Bytes of a connection that are under way, at most."""

_SETTINGS = {
    "tcp_congestion_control": "reno",  # has nothing to do where no packet is lost
    "tcp_wmem": f"4096 {SEND_BUFFER} {SEND_BUFFER}",
    "tcp_no_metrics_save": "1",
}
"""Below /proc/sys/net/ipv4."""

_WHOLE, _ACKNOWLEDGEMENTS, _FIRST_FLOW = 0xFFFF, 0xFFFE, 1
"""Classes of a port."""

_PROGRAM = (
    (0x30, 0, 0, 46),  # the byte with the length of the TCP header, in its upper half in words
    (0x54, 0, 0, 0xF0),
    (0x74, 0, 0, 2),
    (0x04, 0, 0, 20),  # and of the IP header
    (0x07, 0, 0, 0),
    (0x28, 0, 0, 16),  # the length of the packet
    (0x1D, 0, 2, 0),  # if that is all,
    (0x00, 0, 0, 0x10000 + _ACKNOWLEDGEMENTS),
    (0x16, 0, 0, 0),
    (0x20, 0, 0, 34),  # else both port numbers,
    (0x24, 0, 0, 0x9E3779B1),  # hashed to 0..FLOWS - 1
    (0x74, 0, 0, 32 - (FLOWS - 1).bit_length()),
    (0x04, 0, 0, 0x10000 + _FIRST_FLOW),
    (0x16, 0, 0, 0),
)
"""Classic BPF that returns the class of a TCP packet: code, two jumps, constant."""

_CLONE_NEWNET = 0x40000000


class EmulatedNetwork:
    """The network of `cluster`, whose bandwidth is that of the payload of one connection.

    Raises UserError where it cannot be made: without root, for one.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        self._spaces: list[int] = []
        try:
            for _ in range(cluster.devices):
                self._add_space()
            self._connect(cluster)
        except OSError as error:
            self.close()
            why = f"{error.filename or error.strerror}: {os.strerror(error.errno or 0)}"
            needs = "run this as root, with ip and tc of iproute2"
            raise UserError(f"no network can be emulated here: {why}: {needs}") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Gives up the namespaces, which end with the last process inside."""
        for space in [*self._spaces, self._home]:
            os.close(space)
        self._spaces = []

    def enter(self, rank: int) -> None:
        """Puts the calling thread, and what it forks, on the device of that rank."""
        _set_space(self._spaces[rank])

    @staticmethod
    def address(rank: int) -> str:
        return f"10.0.{rank // 200}.{rank % 200 + 1}"

    def _connect(self, cluster: Cluster) -> None:
        """Joins the devices of each machine by a switch, these by one more, and so on."""
        devices = below = list(self._spaces)
        for count, rate in zip(cluster.machines, cluster.bandwidth, strict=True):
            switches = [self._add_space() for _ in range(len(below) // count)]
            for number, switch in enumerate(switches):
                self._run(switch, "ip", ["link add switch type bridge", "link set switch up"])
                for port, other in enumerate(below[number * count : (number + 1) * count]):
                    self._link(switch, f"port{port}", other, rate, below is not devices)
            below = switches
        for rank, device in enumerate(devices):
            self._run(device, "ip", [f"address add {self.address(rank)}/16 dev {PORT}"])

    def _link(self, switch: int, name: str, other: int, rate: float, to_switch: bool) -> None:
        """A link of `rate` bytes per second from a port of `switch` to a device or switch."""
        peer = f"peer name {PORT} netns /proc/{os.getpid()}/fd/{other}"
        self._run(switch, "ip", [f"link add {name} type veth {peer}"])
        for space, end, plugged in ((switch, name, True), (other, PORT, to_switch)):
            master = "master switch" if plugged else ""
            # Single packets, in place of bundles that the receiver takes apart.
            self._run(space, "ip", [f"link set {end} mtu {MTU} gso_max_segs 1 {master} up"])
            self._run(space, "tc", _limits(end, rate))

    def _add_space(self) -> int:
        """A new namespace, with its settings."""
        if _libc.unshare(_CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "unshare")
        with self._returning():
            self._spaces.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY))
            for name, value in _SETTINGS.items():
                Path("/proc/sys/net/ipv4", name).write_text(value, encoding="utf-8")
            Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1", encoding="utf-8")
        self._run(self._spaces[-1], "ip", ["link set lo up"])
        return self._spaces[-1]

    def _run(self, space: int, program: str, lines: Sequence[str]) -> None:
        """Runs the lines of `ip` or `tc` in a namespace."""
        with self._returning():
            _set_space(space)
            done = subprocess.run(
                [program, "-batch", "-"], input="\n".join(lines), capture_output=True, text=True
            )
        if done.returncode:
            raise UserError(f"{program}: {done.stderr.strip().splitlines()[0]}")

    @contextmanager
    def _returning(self) -> Iterator[None]:
        """Afterwards this thread is in its own namespace again."""
        try:
            yield
        finally:
            _set_space(self._home)


def _limits(port: str, rate: float) -> list[str]:
    """Lines of tc: all flows together have `rate` bytes of payload per second, evenly shared."""
    bits = round(8 * rate * ON_THE_WIRE)
    limits = f"ceil {bits}bit burst {BURST} cburst {BURST} quantum {_FRAME}"
    lines = [
        f"qdisc add dev {port} root handle 1: htb default {_FIRST_FLOW:x}",
        f"class add dev {port} parent 1: classid 1:{_WHOLE:x} htb rate {bits}bit {limits}",
    ]
    for flow in (_ACKNOWLEDGEMENTS, *range(_FIRST_FLOW, _FIRST_FLOW + FLOWS)):
        own = f"parent 1:{_WHOLE:x} classid 1:{flow:x} htb rate {bits // FLOWS}bit {limits}"
        lines += [
            f"class add dev {port} {own}",
            f"qdisc add dev {port} parent 1:{flow:x} bfifo limit {QUEUE}",
        ]
    program = ",".join(" ".join(map(str, step)) for step in _PROGRAM)
    found = f"bpf bytecode '{len(_PROGRAM)},{program}'"
    return [*lines, f"filter add dev {port} parent 1: protocol ip {found}"]


_libc = ctypes.CDLL(None, use_errno=True)


def _set_space(space: int) -> None:
    if _libc.setns(space, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
