"""Operators as plain data: how their inputs lie in memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from joint_models import traced_model
from pydantic import ValidationError
from torch import Tensor

from pipedream.capture.programs.description import describe, describe_operator
from pipedream.graph.placements.operators import TensorType
from pipedream.graph.placements.placement import Shard
from pipedream.profiler.discovery.sizes import with_small_sizes
from pipedream.profiler.timing.cold_inputs import ColdInputs
from pipedream.sharding.rules.strategy import local_type

ADD = torch.ops.aten.add.Tensor


def read(tensor: Tensor) -> TensorType:
    """The type of an operator's input."""
    return describe_operator(ADD, (tensor, tensor), {}, tensor)[0].inputs[0]


@given(st.permutations(range(4)), st.lists(st.integers(1, 3), min_size=4, max_size=4))
def test_a_tensor_of_the_type_lies_there_in_the_same_way(
    order: list[int], sizes: list[int]
) -> None:
    tensor = torch.zeros(sizes).permute(order)
    operator = describe_operator(ADD, (tensor, tensor), {}, tensor)[0]
    for laid in ColdInputs(torch.device("cpu"), 0).of(operator):
        assert laid.shape == tensor.shape
        long = [dim for dim in range(4) if tensor.shape[dim] > 1]
        assert [laid.stride(dim) for dim in long] == [tensor.stride(dim) for dim in long]


def test_what_is_repeated_or_lies_there_as_counted_has_no_order() -> None:
    whole = torch.zeros(3, 4, 5)
    for each in (whole, whole[:, 1:3], whole[:1].expand(3, 4, 5).transpose(0, 1), whole[0, 0, 0]):
        assert read(each).order == ()
    assert read(torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)).order == (0, 2, 3, 1)
    assert read(whole.mT).order == (0, 2, 1)


def test_a_part_lies_there_as_the_whole_and_what_is_run_small_need_not() -> None:
    transposed = read(torch.zeros(64, 32).t())
    assert local_type(transposed, Shard(1), 2, 0) == read(torch.zeros(32, 32).t())
    product = torch.ops.aten.mm.default
    given = torch.zeros(16, 32), torch.zeros(64, 32).t()
    operator, _ = describe_operator(product, given, {}, torch.zeros(16, 64))
    assert operator.inputs[1].order == (1, 0)
    assert with_small_sizes(operator).inputs[1].order == ()


def test_a_traced_model_has_products_with_transposed_weights() -> None:
    calls = describe(traced_model("mlp").joint).calls
    products = [call.operator for call in calls if call.operator.family == "aten.addmm"]
    assert products
    assert {each.inputs[2].order for each in products} == {(1, 0)}


def test_an_order_has_each_dimension_once() -> None:
    with pytest.raises(ValidationError, match="write each dimension of the shape once"):
        TensorType(shape=(2, 3), dtype="float32", element_bytes=4, order=(0, 0))
