"""Parts of tensors, laid out for an exchange and back."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from processes import free_port, run_processes
from torch import Tensor
from torch.distributed import TCPStore

from pipedream.comm.buckets import Buckets
from pipedream.comm.transport import Transport
from pipedream.comm.zero.gather import Gather
from pipedream.comm.zero.rows import Rows, own_part, part

SHAPES = [(), (1,), (2,), (7,), (3, 5), (0, 4), (4, 2, 3)]


@given(size=st.integers(0, 1000), replicas=st.integers(1, 9))
def test_parts_follow_one_another_and_are_even(size: int, replicas: int) -> None:
    parts = [part(size, replicas, replica) for replica in range(replicas)]
    assert [index for each in parts for index in range(size)[each]] == list(range(size))
    width = -(-size // replicas)
    assert all(each.stop - each.start <= width for each in parts)
    assert size == 0 or parts[0].stop == width, "the first has a part of every tensor"


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_rows_hold_every_element_once_where_its_owner_finds_it(replicas: int) -> None:
    tensors = {str(shape): torch.randn(shape) for shape in SHAPES}
    rows = Rows.of(tensors, list(tensors), replicas, more=2)
    for name, tensor in tensors.items():
        for there, here in rows.pairs(name, tensor.reshape(-1)):
            there.copy_(here)
    assert rows.matrix.shape[1] == sum(-(-prod(shape) // replicas) for shape in SHAPES) + 2
    for name, tensor in tensors.items():
        for replica in range(replicas):
            own, expected = rows.own(name, tensor, replica), own_part(tensor, replicas, replica)
            assert (own is None) == (expected is None)
            assert own is None or torch.equal(own, expected)  # type: ignore[arg-type]
        back = torch.full_like(tensor.reshape(-1), torch.nan)
        for there, here in rows.pairs(name, back):
            here.copy_(there)
        assert torch.equal(back.view_as(tensor), tensor)


def _exchanged(rank: int, ranks: int, port: int) -> list[Any]:
    """The whole sums, by way of the parts, of tensors that are no multiple of anything, one of them
    transposed and one complex, and of one that is large and even; of one no rank has a gradient, of
    another the first alone.
    """
    store = TCPStore("127.0.0.1", port, ranks, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    parameters = {
        "scalar": torch.zeros((), dtype=torch.float64),
        "odd": torch.zeros(7, dtype=torch.float64),
        "turned": torch.zeros(3, 5, dtype=torch.float64).T,
        "complex": torch.zeros(5, dtype=torch.complex128),
        "nobody's": torch.zeros(4, dtype=torch.float64),
        "first's": torch.zeros(2, 2, dtype=torch.float64),
        "large": torch.zeros(300, 240, dtype=torch.float64),
    }
    parameters = {name: each.requires_grad_() for name, each in parameters.items()}
    group = dist.group.WORLD
    assert group is not None
    transport = Transport(torch.device("cpu"), "gloo")
    buckets = Buckets(parameters, transport, group, most_bytes=100, divided=True)
    gather = Gather(parameters, transport, group, most_bytes=100)
    for turn in (1, 2):
        gradients, parts = _gradients(parameters, rank, turn), dict[str, Tensor]()
        buckets.finish(gradients)
        for name, parameter in parameters.items():
            with torch.no_grad():
                parameter.fill_(-1.0)
            own = own_part(parameter.data, ranks, rank)
            assert (own is None or name == "nobody's") == (name not in gradients)
            if own is not None:
                parts[name] = own.copy_(gradients.get(name, own))
        gather.run(parts)
    dist.destroy_process_group()
    return [each.detach().numpy() for each in parameters.values()]


def _gradients(parameters: dict[str, Tensor], rank: int, turn: int) -> dict[str, Tensor]:
    known = {}
    for name, each in parameters.items():
        generator = torch.Generator().manual_seed(100 * turn + 10 * rank + len(name))
        values = torch.randn(each.shape, generator=generator, dtype=each.dtype)
        if name != "nobody's" and (name != "first's" or rank == 0):
            known[name] = values
    return known


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_of_parts_gathered_are_the_sums(ranks: int) -> None:
    for found in run_processes(_exchanged, ranks, free_port()):
        shapes = {"scalar": (), "odd": (7,), "turned": (5, 3), "complex": (5,)}
        shapes |= {"nobody's": (4,), "first's": (2, 2), "large": (300, 240)}
        like = {
            name: torch.zeros(shape, dtype=torch.complex128 if name == "complex" else torch.float64)
            for name, shape in shapes.items()
        }
        terms = [_gradients(like, rank, 2) for rank in range(ranks)]
        tensors = map(torch.from_numpy, found)
        for (name, zeros), tensor in zip(like.items(), tensors, strict=True):
            expected = sum((each[name] for each in terms if name in each), zeros)
            if name == "nobody's":
                expected = torch.full_like(zeros, -1.0)
            torch.testing.assert_close(tensor, expected, rtol=1e-14, atol=1e-14, msg=name)
