"""Seconds between, beside and at the sizes that were measured."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml
from estimates import device, operator, tensor

from pipedream.graph.errors import UserError
from pipedream.graph.placements.operators import Operator
from pipedream.profiler.estimate.device_file import read_device
from pipedream.profiler.estimate.roofline import Roofline
from pipedream.profiler.estimate.work import Work


def product(log: float, dtype: str = "bfloat16") -> Work:
    flops = 2 * 2.0 ** (3 * log)
    return Work("product", "product", dtype, flops, 6 * 2.0 ** (2 * log), (log, log, log, 0.0))


def test_what_was_measured_takes_what_was_measured() -> None:
    roofline = Roofline(device())
    for log, part in ((8.0, 0.25), (12.0, 0.75)):
        work = product(log)
        bound = max(work.flops / 2e14, work.bytes / 1e12)
        assert roofline.of_work(work) == pytest.approx(bound / part, rel=1e-3)


def test_between_two_sizes_lies_between() -> None:
    assert 0.25 < Roofline(device()).efficiency(product(10.0)) < 0.75


def test_a_type_that_was_not_measured_is_as_efficient_at_its_own_peak() -> None:
    roofline = Roofline(device())
    assert roofline.efficiency(product(12.0, "float32")) == pytest.approx(0.75, rel=1e-3)
    assert roofline.bound(product(12.0, "float32")) == 2 * roofline.bound(product(12.0))


def test_no_operator_is_below_the_launch() -> None:
    small = operator("aten.relu.default", (tensor(2),), tensor(2))
    assert Roofline(device()).seconds(small) == 1e-6


def test_a_kind_that_was_not_measured_is_like_other_passes_over_memory() -> None:
    work = Work("aten.unheard_of", "pass", "float32", 0.0, 2.0**20, (20.0,))
    assert Roofline(device()).efficiency(work) == pytest.approx(0.5, rel=1e-2)


def test_a_device_that_waits_for_its_host_takes_what_that_takes() -> None:
    """Of many small operators; a few large ones keep it busy meanwhile."""
    slow_host = device(host={"usual": 1e-5}, host_backward={"usual": 2e-5})
    roofline = Roofline(slow_host)
    small = operator("aten.relu.default", (tensor(64),), tensor(64))
    large = operator("aten.relu.default", (tensor(1 << 24),), tensor(1 << 24))
    assert roofline.in_passes([small] * 4, backward=False) == [1e-5] * 4
    assert roofline.in_passes([small] * 4, backward=True) == [2e-5] * 4
    both = roofline.in_passes([small, large], backward=False)
    assert both == [roofline.seconds(small), roofline.seconds(large)]


@pytest.mark.parametrize("name", ["a100", "b200", "h100", "h200", "l40s", "mi300x", "cpu"])
def test_shipped_files_can_be_read(name: str) -> None:
    file = read_device(name)
    assert file.efficiency
    assert all(
        0 < point[-1] < 2 for by in file.efficiency.values() for p in by.values() for point in p
    )
    assert all(
        math.isfinite(size)
        for by in file.efficiency.values()
        for p in by.values()
        for s in p
        for size in s
    )


def test_an_unknown_device_is_told_with_the_likely_one() -> None:
    with pytest.raises(UserError, match="h100"):
        read_device("h1000")


def test_a_device_in_place_of_itself_is_told(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    fields = device(efficiency={}, efficiencies_of=str(path)).model_dump(mode="json")
    path.write_text(yaml.safe_dump(fields))
    with pytest.raises(UserError, match="has none of its own"):
        read_device(str(path))


def test_in_fp8_products_have_its_peak_where_kernels_take_them() -> None:
    """Bounded by computing, they take half of the time at twice the peak; attention, what has odd
    sides, and other types stay as they are.
    """
    peak = {"float32": 1e14, "bfloat16": 2e14, "float8_e4m3fn": 4e14}
    on = device(peak=peak)
    plain, fp8 = Roofline(on), Roofline(on, fp8=True)

    def square(side: int, dtype: str) -> Operator:
        sides = tensor(side, side, dtype=dtype)
        return operator("aten.mm.default", (sides, sides), sides)

    assert fp8.seconds(square(8192, "bfloat16")) == pytest.approx(
        plain.seconds(square(8192, "bfloat16")) / 2
    )
    for other in (square(8200, "bfloat16"), square(8192, "float32")):
        assert fp8.seconds(other) == plain.seconds(other)
