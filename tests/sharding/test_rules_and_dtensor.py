"""Strategies next to torch's DTensor: from the same placements it comes to the same, or the
difference is in a list here with its reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch.distributed as dist
from divided import Executed, executed_in, held
from joint_models import MODELS, traced_model
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from pipedream.capture.programs.description import execute
from pipedream.graph.placements.placement import Partial, Placement, Replicate, Shard
from pipedream.sharding.rules import strategies
from pipedream.sharding.rules.strategy import Strategy

_SUMS = "it adds a partial tensor up before operators that are linear in it"
_CHUNKS = "its strided shards do not pass through"
_NONE = "it has no rule"
_BATCH = "it knows the batch alone: the others it executes with wrong shapes or placements"
_WITHIN = "of a divided batch it gathers what a strategy adds up within the operator"
STRICTER = {
    "aten._adaptive_avg_pool2d_backward": _SUMS,
    "aten._log_softmax_backward_data": _SUMS,
    "aten._scaled_dot_product_flash_attention_for_cpu": _NONE,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _NONE,
    "aten._softmax_backward_data": _SUMS,
    "aten._unsafe_view": _CHUNKS,
    "aten.bernoulli": _NONE,
    "aten.cat": _CHUNKS,
    "aten.clone": _SUMS,
    "aten.convolution": _BATCH,
    "aten.convolution_backward": _BATCH,
    "aten.embedding": _SUMS,
    "aten.gelu_backward": _SUMS,
    "aten.masked_fill": _SUMS,
    "aten.mean": _SUMS,
    "aten.native_batch_norm": _WITHIN,
    "aten.native_batch_norm_backward": _SUMS,
    "aten.native_layer_norm_backward": _SUMS,
    "aten.nll_loss_backward": _SUMS,
    "aten.split": _CHUNKS,
    "aten.threshold_backward": _SUMS,
    "aten.view": _CHUNKS,
}
"""Families in which DTensor communicates, or raises an error, where a strategy does not."""
CONTRADICTORY = {"aten.convolution": _BATCH, "aten.convolution_backward": _BATCH}
"""Those in which it communicates nothing, and says that outputs are placed in another way."""


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Two devices, of which this process is one; what they send each other goes nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:DTensor random operators")
def test_dtensor_comes_to_the_same(mesh: DeviceMesh) -> None:
    cases = [each for name in MODELS for each in executed_in(traced_model(name))]
    stricter, contradictory, same = set(), set(), 0
    for case in {each.operator: each for each in cases}.values():
        for strategy in strategies(case.operator, 2):
            found = _by_dtensor(case, strategy, mesh)
            if found is None:
                stricter.add(case.operator.family)
            elif found != _computed(case, strategy.outputs):
                contradictory.add(case.operator.family)
            else:
                same += 1
    assert same > 800
    assert stricter <= STRICTER.keys()
    assert contradictory <= CONTRADICTORY.keys()


def _by_dtensor(
    case: Executed, strategy: Strategy, mesh: DeviceMesh
) -> list[Placement | None] | None:
    """The placements of the outputs; None if it communicates or raises an error."""
    inputs = [
        DTensor.from_local(
            held(tensor, placement, 2)[0],
            mesh,
            [_to_torch(placement)],
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
        for tensor, placement in zip(case.inputs, strategy.inputs, strict=True)
    ]
    with CommDebugMode() as communication:
        try:
            outputs = execute(case.operator, inputs)
        except (RuntimeError, NotImplementedError, AssertionError, ValueError):
            return None
    if communication.get_total_counts():
        return None
    placements = [
        _from_torch(each.placements[0]) if isinstance(each, DTensor) else None for each in outputs
    ]
    return _computed(case, placements[: len(case.operator.outputs)])


def _computed(case: Executed, placements: Sequence[Placement | None]) -> list[Placement | None]:
    pairs = zip(placements, case.operator.outputs, strict=True)
    return [None if type_ is None else placement for placement, type_ in pairs]


def _to_torch(placement: Placement) -> TorchPlacement:
    match placement:
        case Shard(dim, 1):
            return TorchShard(dim)
        case Shard(dim, chunks):
            return _StridedShard(dim, split_factor=chunks)
        case Partial():
            return TorchPartial()
    return TorchReplicate()


def _from_torch(placement: TorchPlacement) -> Placement | None:
    match placement:
        case _StridedShard():
            return Shard(placement.dim, placement.split_factor)
        case TorchShard():
            return Shard(placement.dim)
        case TorchPartial(reduce_op="sum"):
            return Partial()
        case TorchReplicate():
            return Replicate()
    return None
