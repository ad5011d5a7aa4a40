"""Text to bytes and seconds and back. Units are decimal: 1GB is 10^9 bytes, 1GiB is 2^30."""

from __future__ import annotations

import math
import re

_FACTORS = {"": 1.0, "B": 1.0} | {
    prefix + unit: float(base**power)
    for power, prefix in enumerate("KMGT", start=1)
    for base, unit in ((1000, ""), (1000, "B"), (1024, "iB"))
}
_AMOUNT = re.compile(r"\s*([0-9.]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-z]*?)(/s|ps)?\s*")

_PER_SECOND = {"": 1.0, "s": 1.0, "ms": 1e3, "us": 1e6, "µs": 1e6, "ns": 1e9}
_DURATION = re.compile(r"\s*([0-9.]+(?:[eE][-+]?[0-9]+)?)\s*(|s|ms|us|µs|ns)\s*")


def parse_bytes(text: str) -> float:
    """Reads `10GB`, `1e9`, `512MiB`, `25Gbit`, `25Gbps` or `10GB/s` as bytes (per second).

    Raises ValueError with a message for the user.
    """
    match = _AMOUNT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not an amount of bytes: write 1e9, 10GB or 16GiB")
    number, unit, rate = match.groups()
    bits = unit.endswith("bit") or (unit.endswith("b") and rate == "ps")
    if unit.endswith("b") and not bits:
        raise ValueError(f"{text!r} may mean bits or bytes: write GB for bytes, Gbit for bits")
    prefix = (unit.removesuffix("bit").removesuffix("b") if bits else unit).upper()
    try:
        value = float(number) * _FACTORS.get(prefix.replace("IB", "iB"), math.nan)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"{text!r} is not a positive amount of bytes: write 1e9, 10GB or 16GiB")
    return value / 8 if bits else value


def parse_seconds(text: str) -> float:
    """`20us`, `1.5ms`, `2e-5` or `0.1s` in seconds. Raises ValueError with a message."""
    match = _DURATION.fullmatch(text)
    try:
        value = float(match[1]) / _PER_SECOND[match[2]] if match else math.nan
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"{text!r} is not a time: write 20us, 1.5ms or 0.1s")
    return value


def show_bytes(amount: float, digits: int = 3) -> str:
    """Writes `1234567.0` as `1.23 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(amount) < 999.5:
            return f"{amount:.{digits}g} {unit}"
        amount /= 1000
    return f"{amount:.{digits}g} TB"


def show_seconds(seconds: float) -> str:
    """Writes a duration with the unit that reads best: `19.03 ms`."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if abs(seconds) * factor < 999.5:
            return f"{seconds * factor:.4g} {unit}"
    return f"{seconds:.4g} s"


def show_amount(amount: float) -> str:
    """Writes `1234567.0` as `1.23 million`."""
    for factor, unit in ((1e12, " trillion"), (1e9, " billion"), (1e6, " million")):
        if amount >= factor:
            return f"{amount / factor:.3g}{unit}"
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:.3g}"
