"""Ways to divide operators, found by running them; some of these end their process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipedream.capture.programs.description import describe_operator
from pipedream.capture.programs.trial import CannotTry, can_be_divided
from pipedream.graph.placements.operators import Operator, Way
from pipedream.profiler.discovery import known
from pipedream.profiler.discovery.known import discover
from pipedream.profiler.discovery.search import find_ways
from pipedream.profiler.discovery.separate import tried
from pipedream.profiler.discovery.sizes import OF_LARGE, OF_SMALL, with_small_sizes
from pipedream.sharding.rules import local_operator, strategies
from pipedream.sharding.rules.discovered import as_way

aten = torch.ops.aten
normal = torch.randn


def described(target: torch._ops.OpOverload, *args: object) -> Operator:
    """Its outputs' types are those of a run without values."""
    return describe_operator(target, args, {}, target(*args))[0]


def texts(ways: Iterator[Way] | tuple[Way, ...]) -> set[str]:
    return {", ".join(each.inputs) + " -> " + ", ".join(each.outputs) for each in ways}


@pytest.fixture(scope="module")
def library() -> Iterator[torch.library.Library]:
    library = torch.library.Library("discovered", "DEF")
    yield library
    library._destroy()


def define(
    library: torch.library.Library, name: str, call: Callable[[Tensor], Tensor]
) -> torch._ops.OpOverload:
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, call, "CPU")
    library.impl(name, torch.empty_like, "Meta")
    found: torch._ops.OpOverload = getattr(torch.ops.discovered, name).default
    return found


def on_meta(target: torch._ops.OpOverload, *shape: int) -> Operator:
    return described(target, torch.empty(shape, device="meta"))


RULED = {
    "mm": lambda: described(aten.mm.default, normal(24, 40), normal(40, 64)),
    "addmm": lambda: described(aten.addmm.default, normal(64), normal(24, 40), normal(40, 64)),
    "relu": lambda: described(aten.relu.default, normal(40, 50)),
    "sum": lambda: described(aten.sum.dim_IntList, normal(40, 50), [0], True),
    "expand": lambda: described(aten.expand.default, normal(1, 50), [40, 50]),
    "embedding": lambda: described(
        aten.embedding.default, normal(99, 64), torch.zeros(8, 40).int()
    ),
}


@pytest.mark.parametrize("name", RULED)
def test_what_is_found_is_what_the_rules_say(name):
    operator = RULED[name]()
    of_rules = (as_way(each) for each in strategies(operator, 2)[1:])
    assert texts(find_ways(operator)) == texts(tuple(of_rules))


def test_a_product_of_matrices_is_divided_by_rows_columns_and_terms():
    assert texts(find_ways(RULED["mm"]())) == {
        "S(0), R -> S(0)",
        "R, S(1) -> S(1)",
        "S(1), S(0) -> P",
        "P, R -> P",
        "R, P -> P",
    }


def test_an_argument_with_the_shape_of_an_output_is_local(library):
    library.define("spread(Tensor x, int[] shape) -> Tensor")
    library.impl("spread", lambda x, shape: x.expand(shape).clone(), "CPU")
    library.impl("spread", lambda x, shape: x.new_empty(shape), "Meta")
    operator = described(torch.ops.discovered.spread.default, normal(1, 40), [30, 40])
    ways = tuple(find_ways(operator))
    assert texts(ways) == {"S(1) -> S(1)", "R -> S(0)", "P -> P"}
    operator = operator.model_copy(update={"ways": ways})
    (rows,) = (each for each in strategies(operator, 3) if as_way(each).outputs == ("S(0)",))
    local = local_operator(operator, rows, 3, 2)
    assert local.arguments[1] == (10, 40)
    assert can_be_divided(operator, (rows, rows), (3, 2))


def test_sizes_enter_what_an_operator_computes(library):
    """A mean of rows is no sum of means, and a position within the whole is none within a part."""
    mean = define(library, "divide_by_rows", lambda x: x / x.shape[0])
    assert texts(find_ways(on_meta(mean, 30, 40))) == {"S(1) -> S(1)", "P -> P"}
    place = define(library, "positions", lambda x: x + torch.arange(x.shape[1]))
    assert texts(find_ways(on_meta(place, 30, 40))) == {"S(0) -> S(0)"}


def test_windows_that_leave_out_positions_are_not_divided_by_position():
    """They would be where parts are even; and windows of one element next to each other are."""
    apart = described(aten.convolution.default, *_pictures(), None, [2, 2], *_PADDING)
    assert not any("S(2)" in each for each in texts(find_ways(apart)))
    beside = described(aten.convolution.default, *_pictures(), None, [1, 1], *_PADDING)
    assert "S(2), R -> S(2)" in texts(find_ways(beside))
    of_rules = {as_way(each) for each in strategies(beside, 2)[1:]}
    assert texts(find_ways(beside)) == texts(tuple(of_rules))


_PADDING = ([0, 0], [1, 1], False, [0, 0], 1)


def _pictures() -> tuple[Tensor, Tensor]:
    return normal(8, 64, 56, 56), normal(128, 64, 1, 1)


def test_only_large_tensors_are_divided_otherwise(library):
    """What is found with small tensors is tried with those that the operator has."""
    other = define(library, "large", lambda x: x.cumsum(0) if x.shape[0] > 90 else x * 2)
    assert "S(0) -> S(0)" in texts(find_ways(on_meta(other, 40, 30)))
    assert texts(find_ways(on_meta(other, 200, 30))) == {"S(1) -> S(1)", "P -> P"}


def test_random_numbers_are_not_divided(library):
    noise = define(library, "noise", lambda x: x + torch.randn_like(x))
    with pytest.raises(CannotTry, match="something else each time"):
        list(find_ways(on_meta(noise, 30, 40)))


def test_operators_that_end_their_process_or_never_end_are_survived(library):
    """Those before, between and after them are found."""
    ends = define(library, "ends", lambda x: os.abort() or x)
    hangs = define(library, "hangs", lambda x: time.sleep(60) or x)
    some = define(library, "some", lambda x: x if x.shape[1] % 2 == 0 else os.abort() or x)
    relu = RULED["relu"]()
    operators = [relu, on_meta(ends, 30, 40), on_meta(hangs, 30, 40), on_meta(some, 36, 42), relu]
    first, aborted, hung, partly, last = tried(operators, seconds=2.0)
    assert texts(first[0]) == texts(last[0]) == {"S(0) -> S(0)", "S(1) -> S(1)"}
    assert aborted == ((), "it ended the process that tried it (exit code -6)")
    assert hung == ((), "it took longer than 2 s")
    assert "S(0) -> S(0)" in texts(partly[0])
    assert "S(1) -> S(1)" not in texts(partly[0])


def test_what_is_known_is_not_tried_again(tmp_path: Path, monkeypatch):
    operator = RULED["relu"]()
    first = discover([operator], tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(known, "tried", lambda operators: pytest.fail("tried again"))
        assert discover([operator], tmp_path) == first
    (tmp_path / "discovered.json").write_text("{not ours")
    assert discover([operator], tmp_path) == first
    assert b"S(1)" in (tmp_path / "discovered.json").read_bytes()


def test_a_folder_that_cannot_be_written_only_costs_time(tmp_path: Path):
    (tmp_path / "file").write_text("")
    assert discover([RULED["relu"]()], tmp_path / "file" / "under")


def test_small_sizes_keep_what_relates_sizes():
    view = described(aten.view.default, torch.empty(8, 1024, 768, device="meta"), [8 * 1024, 768])
    small = with_small_sizes(view)
    (batch, length, width), (rows, columns) = small.inputs[0].shape, small.outputs[0].shape
    assert (batch * length, width) == (rows, columns)
    assert small.arguments[1] == (rows, columns)
    assert length < 100


def test_what_is_a_product_by_chance_is_small_too(tmp_path: Path):
    """An image of 224 x 224 stayed so where there were 16 examples and a window of 7, since 112 is
    16 x 7: discovery of ResNet-50's operators took two minutes in place of one.
    """
    shapes = (16, 3, 224, 224), (64, 3, 7, 7)
    image, weight = (torch.empty(shape, device="meta") for shape in shapes)
    stem = described(
        aten.convolution.default,
        *(image, weight, None, [2, 2], [3, 3], [1, 1], False, [0, 0], 1),
    )
    assert with_small_sizes(stem).inputs[0].shape == (16, 3, 224, 224)
    assert with_small_sizes(stem, OF_LARGE).inputs[0].shape[2] < 60
    view = described(aten.view.default, torch.empty(4, 8, 5, device="meta"), [32, 5])
    ways, _ = discover([view], tmp_path)[view]
    assert "S(2) -> S(1)" in texts(ways)


def test_products_of_products_need_not_be_one(tmp_path: Path):
    """16 heads of 4 examples over 1,024 tokens, which are 16 x 64 by chance, stayed so: GPT-2 of 24
    layers was searched for four minutes.
    """
    scores = torch.empty(64, 1024, 1024, device="meta")
    view = described(aten._unsafe_view.default, scores, [4, 16, 1024, 1024])
    assert with_small_sizes(view).inputs[0].shape == scores.shape
    small = with_small_sizes(view, OF_SMALL)
    assert small.inputs[0].shape[1] < 60
    ways, _ = discover([view], tmp_path)[view]
    assert {"S(1) -> S(2)", "S(2) -> S(3)"} <= texts(ways)


def test_a_split_into_sizes_that_are_divided_as_well_gives_more_parts():
    """Of 3,072 columns in parts of 1,024, and as many rows: devices that have half the rows were
    told to make parts of 512, and each time that ended the process.
    """
    parts = described(aten.split.Tensor, torch.empty(4, 40, 120, device="meta"), 40, 2)
    assert "S(0) -> S(0), S(0), S(0)" in texts(find_ways(parts))
