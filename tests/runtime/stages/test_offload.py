"""What stages keep in the memory of the host comes back as it was, and is not kept twice."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from itertools import zip_longest

import pytest
import torch
from one_rank import OneRank, none_halved, regression
from saving_models import EACH, Block, Convolutions, Layers, Shared, blocks, wide
from torch import Tensor, nn

from pipedream.runtime.engine.offload import Copied, HostCopier, OffloadedActivations


def trained(model: nn.Module, offload: bool, **more: object) -> OneRank:
    options: dict[str, object] = {"halved": none_halved, "data": regression(), **more}
    return OneRank(copy.deepcopy(model), offload=offload, **options).train()  # type: ignore[arg-type]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("make", [blocks, Convolutions, Shared, Block])
@pytest.mark.parametrize("stages", [1, 2])
def test_equal_to_the_plain_run(make: Callable[[], nn.Module], stages: int) -> None:
    torch.manual_seed(3)
    model = make().to(torch.float64)
    plain, moved = (trained(model, offload, stages=stages) for offload in (False, True))
    assert moved.losses == plain.losses
    for name, tensor in plain.state.items():
        assert torch.equal(tensor, moved.state[name]), name


class Noted(HostCopier):
    """Counts what it copies."""

    def __init__(self) -> None:
        self.bytes_out, self.bytes_back = 0, 0

    def out(self, tensor: Tensor) -> tuple[Tensor, Copied | None]:
        self.bytes_out += tensor.nbytes
        return super().out(tensor)

    def back(self, tensor: Tensor) -> tuple[Tensor, Copied | None]:
        self.bytes_back += tensor.nbytes
        return super().back(tensor)


IN_FLIGHT, MINIBATCHES = 4, 9


def one_forward_one_backward() -> list[tuple[str, int]]:
    passes = [("F", b) for b in range(IN_FLIGHT - 1)]
    for b in range(MINIBATCHES):
        passes += [("F", b + IN_FLIGHT - 1)] if b + IN_FLIGHT <= MINIBATCHES else []
        passes += [("B", b)]
    return passes


def test_the_device_holds_two_minibatches_of_four() -> None:
    """Each has four activations, which move once and come back once; parameters stay."""
    torch.manual_seed(3)
    model, data = Layers(4), wide(MINIBATCHES)
    offload, copier = OffloadedActivations(torch.device("cpu")), Noted()
    offload.copier = copier
    passes, losses, held = one_forward_one_backward(), dict[int, Tensor](), list[int]()
    for (kind, b), (after, coming) in zip_longest(passes, passes[1:], fillvalue=("", 0)):
        offload.begin_pass(b, kind == "B", coming if after == "B" else None)
        if kind == "F":
            (x,) = data.batches[b].inputs
            with offload.saving(b, [*model.parameters(), x]):
                losses[b] = model(x).sum()
        else:
            losses.pop(b).backward()
        held.append(on_device())
    assert copier.bytes_out == MINIBATCHES * 4 * EACH
    # The first ones and the last ones are wanted before they have left.
    assert copier.bytes_back >= (MINIBATCHES - IN_FLIGHT) * 4 * EACH
    assert max(held) == 2 * 4
    assert held[-1] == 0
    assert not offload.of_minibatch
    expected = copy.deepcopy(model)
    expected.zero_grad()
    for batch in data.batches:
        expected(*batch.inputs).sum().backward()
    for own, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(own.grad, other.grad)  # type: ignore[arg-type]


def on_device() -> int:
    known = (each for each in gc.get_objects() if type(each).__name__ == "_Activation")
    return sum(each.device is not None for each in known)


def test_what_goes_backward_next_stays() -> None:
    model, (x,) = Layers(4), wide(1).batches[0].inputs
    offload, copier = OffloadedActivations(torch.device("cpu")), Noted()
    offload.copier = copier
    offload.begin_pass(0, False, coming=0)
    with offload.saving(0, [*model.parameters(), x]):
        loss = model(x).sum()
    offload.begin_pass(0, True, coming=None)
    loss.backward()
    assert copier.bytes_out == copier.bytes_back == 0
