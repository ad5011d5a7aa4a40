"""What operators have to do, by their types."""

from __future__ import annotations

import math

from estimates import operator, tensor

from pipedream.profiler.estimate.work import work_of


def test_a_product_has_its_three_sizes_and_whether_rows_are_aligned() -> None:
    work = work_of(operator("aten.mm.default", (tensor(8, 16), tensor(16, 32)), tensor(8, 32)))
    assert work is not None
    assert (work.kind, work.flops, work.bytes) == (
        "product",
        2 * 8 * 16 * 32,
        4 * (128 + 512 + 256),
    )
    assert work.sizes == (3.0, 5.0, 4.0, 0.0)
    odd = work_of(operator("aten.mm.default", (tensor(8, 16), tensor(16, 33)), tensor(8, 33)))
    assert odd is not None
    assert odd.sizes[-1] > 0


def test_views_are_no_work() -> None:
    assert work_of(operator("aten.view.default", (tensor(4, 4),), tensor(16))) is None


def test_a_backward_convolution_has_a_product_for_each_gradient_that_is_wanted() -> None:
    inputs = tensor(2, 8, 6, 6), tensor(2, 4, 6, 6), tensor(8, 4, 3, 3)
    rest = (None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    forward = 2 * (2 * 8 * 6 * 6) * (4 * 3 * 3)
    for wanted, kind, times in (
        ((True, True), "convolution backward", 2),
        ((True, False), "convolution input", 1),
        ((False, True), "convolution weight", 1),
    ):
        outputs = [
            each if asked else None
            for each, asked in zip((inputs[1], inputs[2]), wanted, strict=True)
        ]
        work = work_of(operator("aten.convolution_backward.default", inputs, *outputs, rest=rest))
        assert work is not None
        assert (work.kind, work.flops) == (kind, times * forward)


def test_causal_attention_computes_half_of_the_scores() -> None:
    name = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    inputs = (tensor(2, 4, 64, 16),) * 3
    outputs = tensor(2, 4, 64, 16), tensor(2, 4, 64)
    whole = work_of(operator(name, inputs, *outputs, rest=(0.0, False)))
    causal = work_of(operator(name, inputs, *outputs, rest=(0.0, True)))
    assert whole is not None
    assert causal is not None
    assert whole.flops == 2 * causal.flops == 2 * 2 * (2 * 4 * 64 * 64 * 16)


def test_a_lookup_touches_the_rows_it_looks_up() -> None:
    table, places = tensor(50_000, 64), tensor(2, 8, dtype="int64")
    work = work_of(operator("aten.embedding.default", (table, places), tensor(2, 8, 64)))
    assert work is not None
    assert work.bytes == 2 * 4 * 2 * 8 * 64


def test_the_type_is_that_of_the_largest_floating_tensor() -> None:
    wide = tensor(64, 64, dtype="bfloat16")
    work = work_of(operator("aten.add.Tensor", (wide, tensor(64)), wide))
    assert work is not None
    assert work.dtype == "bfloat16"
    assert work.sizes == (math.log2(work.bytes),)
