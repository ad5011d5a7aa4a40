"""Amounts as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipedream.graph.units import parse_bytes, parse_seconds, show_bytes, show_seconds


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("1", 1),
        ("1e9", 1e9),
        ("2.5E+3", 2500),
        ("10GB", 10e9),
        (" 10 GB ", 10e9),
        ("10G", 10e9),
        ("10GB/s", 10e9),
        ("10GBps", 10e9),
        ("16GiB", 16 * 2**30),
        ("512MiB", 512 * 2**20),
        ("3kB", 3000),
        ("1TB", 1e12),
        ("25Gbit", 25e9 / 8),
        ("25Gbit/s", 25e9 / 8),
        ("25Gbps", 25e9 / 8),
        ("100Mbps", 100e6 / 8),
        ("8bit", 1),
    ],
)
def test_amounts(text: str, amount: float) -> None:
    assert parse_bytes(text) == amount


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GB",
        "ten GB",
        "-1GB",
        "0",
        "0GB",
        "1.2.3GB",
        "1XB",
        "nan",
        "inf",
        "1e999",
        "1 GB 2",
        ".",
    ],
)
def test_what_is_no_amount_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match="amount of bytes: write 1e9, 10GB or 16GiB"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["10Gb", "10gb", "10Gb/s"])
def test_bits_or_bytes_is_asked_not_guessed(text: str) -> None:
    with pytest.raises(ValueError, match="write GB for bytes, Gbit for bits"):
        parse_bytes(text)


@given(st.floats(1e-3, 1e14))
def test_a_shown_amount_reads_back_to_three_digits(amount: float) -> None:
    assert parse_bytes(show_bytes(amount)) == pytest.approx(amount, rel=6e-3)


@pytest.mark.parametrize(
    ("amount", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1234567, "1.23 MB"), (999.9e6, "1 GB")],
)
def test_shown_bytes(amount: float, text: str) -> None:
    assert show_bytes(amount) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 us"),
        (1.5e-6, "1.5 us"),
        (0.019032, "19.03 ms"),
        (0.9999, "0.9999 s"),
        (61.26, "61.26 s"),
    ],
)
def test_shown_seconds(seconds: float, text: str) -> None:
    assert show_seconds(seconds) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("20us", 2e-5), ("20 µs", 2e-5), ("1.5ms", 0.0015), ("0.1", 0.1), ("3e-6s", 3e-6), ("0", 0)],
)
def test_times(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "1 min", "-1us", "1.2.3us", "1e999"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ValueError, match="is not a time: write 20us"):
        parse_seconds(text)
