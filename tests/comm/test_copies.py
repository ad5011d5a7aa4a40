"""Copies to a GPU, with tensors that note what is done to them."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest
import torch

from pipedream.comm.device.copies import to_device

GPU = torch.device("cuda")


def tensor(device: str = "cpu", pinned: bool = False) -> MagicMock:
    made = MagicMock(device=torch.device(device))
    made.is_pinned.return_value = pinned
    return made


def test_the_host_does_not_wait_for_copies_of_a_loop_of_the_users() -> None:
    """From pageable memory each microbatch waited until its GPU had done all that came before."""
    given = tensor()
    to_device(given, GPU)
    given.to.assert_not_called()
    given.pin_memory.return_value.to.assert_called_once_with(GPU, non_blocking=True)


@pytest.mark.parametrize(
    ("given", "device"),
    [(tensor(pinned=True), GPU), (tensor("cuda"), GPU), (tensor(), torch.device("cpu"))],
)
def test_memory_that_others_may_change_is_copied_at_once(
    given: MagicMock, device: torch.device
) -> None:
    """A loader may fill its page-locked memory again once the call has returned."""
    to_device(given, device)
    given.pin_memory.assert_not_called()
    given.to.assert_called_once_with(device)
