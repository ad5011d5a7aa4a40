"""Where processes listen for connections, as the kernel says."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_LISTENING = "0A"


def listening(pids: Iterable[int]) -> set[str]:
    """The addresses at which any of these processes accepts TCP connections now."""
    sockets: set[str] = set()
    for pid in pids:
        with suppress(OSError):  # it has ended meanwhile
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    sockets.add(os.readlink(descriptor))
    addresses = set()
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{family}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING and f"socket:[{fields[9]}]" in sockets:
                addresses.add(_address(fields[1].partition(":")[0]))
    return addresses


def _address(words: str) -> str:
    """The kernel writes words of four bytes, each with its lowest byte first."""
    packed = b"".join(bytes.fromhex(words[at : at + 8])[::-1] for at in range(0, len(words), 8))
    return str(ipaddress.ip_address(packed))


def is_loopback(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_loopback


def descendants(pid: int) -> list[int]:
    """The process, and all that it and they have started."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    family = [pid]
    for member in family:
        family += [child for child, parent in parents.items() if parent == member]
    return family
