"""Batch norm in training by devices that divide the batch: they add up sums for each channel.

A device has n of the N elements of a channel. It takes mean and variance of its own, which torch
computes from the deviations, not from squares, and what the devices add up is exact where means are
large, too (Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample
variances", 1979):

    mean      1/N  sum of  n own_mean
    variance  1/N  sum of  n (own_variance + (own_mean - mean)^2)

With known statistics, forward is torch's batch norm in evaluation. So is backward, plus what
reaches the input through the statistics: with x' the normalized input, w the weight, and b and g
the gradients of bias and weight, sums over all devices,

    gradient of the input = that in evaluation - w / deviation (b / N + x' g / N)

What is subtracted is linear in x': a batch norm in evaluation with another weight and bias.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pipedream.capture.programs.description import dtype_of, read_arguments
from pipedream.graph.placements.operators import Input, Operator, TensorType
from pipedream.sharding.rules import summed_types
from pipedream.sharding.rules.normalizations import elements_of_a_channel

AddUp: TypeAlias = Callable[[int, Tensor], Tensor]
"""Of the number of a sum (`summed_types`) and a device's term: the sum over the devices."""


class DividedBatchNorm:
    """A node's target: what a device executes in the place of the `local` operator, on the same
    tensors. Its outputs are the device's part of those of the `whole` operator. Running statistics
    are updated in place.
    """

    def __init__(self, whole: Operator, local: Operator, add_up: AddUp) -> None:
        self.local, self.add_up = local, add_up
        self.count = elements_of_a_channel(whole)
        self.dtype = dtype_of(summed_types(whole)[0])
        self.updates = True
        self.__name__ = self.__qualname__ = "divided_batch_norm"

    def __call__(self, *inputs: Tensor) -> tuple[Tensor | None, ...]:
        backward = self.local.family.endswith("_backward")
        arguments, _ = read_arguments(self.local, inputs)
        results = (self._backward if backward else self._forward)(*arguments)
        return tuple(map(_converted, results, self.local.outputs))

    def statistics(self, inputs: Sequence[Any]) -> list[Any]:
        """Returns those of what it is given that it updates."""
        if self.local.family.endswith("_backward"):
            return []
        own = self.local.arguments[3:5]
        return [inputs[each.input] for each in own if isinstance(each, Input)]

    def without_statistics(self) -> DividedBatchNorm:
        """Returns the same, which leaves running statistics as they are: to run once more."""
        other = copy(self)
        other.updates = False
        return other

    def like(self, inputs: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """Returns tensors like those that it gives for such inputs. The local operator cannot tell:
        torch refuses to normalize one value of a channel, which a device may have of many.
        """
        data = inputs[0]
        return tuple(map(partial(_like, data), self.local.outputs))

    def _forward(
        self,
        data: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
    ) -> Sequence[Tensor]:
        local_count, count = data.numel() // data.shape[1], self.count
        local_mean, local_variance = _statistics(data, self.dtype)
        mean = self.add_up(0, local_mean * local_count) / count
        squares = self.add_up(1, (local_variance + (local_mean - mean).square()) * local_count)
        if self.updates:
            _update(running_mean, mean, momentum)
            _update(running_var, squares / (count - 1), momentum)
        variance = squares / count
        known = mean, variance, False, 0.0, eps
        output = torch.native_batch_norm(data, self._exact(weight), self._exact(bias), *known)[0]
        return output, mean, (variance + eps).rsqrt()

    def _backward(
        self,
        gradient: Tensor,
        data: Tensor,
        weight: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        save_mean: Tensor,
        save_invstd: Tensor,
        training: bool,
        eps: float,
        wanted: Sequence[bool],
    ) -> Sequence[Tensor | None]:
        mean, inverse = save_mean.to(self.dtype), save_invstd.to(self.dtype)
        factor = torch.ones_like(mean) if weight is None else weight.to(self.dtype)
        known = mean, inverse.square().reciprocal()
        of_data, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            *(gradient, data, factor, *known, None, None, False, 0.0, [wanted[0], True, True])
        )
        of_weight, of_bias = self.add_up(0, torch.stack((of_weight, of_bias), 1)).unbind(1)
        if wanted[0]:
            scale = factor * inverse / self.count
            through = -of_weight * scale, -of_bias * scale
            of_data += torch.native_batch_norm(data, *through, *known, False, 0.0, 0.0)[0]
        results = of_data, of_weight.contiguous(), of_bias.contiguous()
        return [each if needed else None for each, needed in zip(results, wanted, strict=True)]

    def _exact(self, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(self.dtype)


def _statistics(data: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns mean and variance of each channel, in the type of new running statistics."""
    running = torch.zeros(data.shape[1], dtype=dtype, device=data.device)
    mean, variance = torch.batch_norm_update_stats(data, running, running.clone(), 0.0)
    return mean, variance


def _update(running: Tensor | None, new: Tensor, momentum: float) -> None:
    if running is not None:
        running.copy_(running.to(new.dtype).lerp(new, momentum))


def _converted(result: Tensor | None, type_: TensorType | None) -> Tensor | None:
    return None if result is None or type_ is None else result.to(dtype_of(type_))


def _like(data: Tensor, type_: TensorType | None) -> Tensor | None:
    if type_ is None:
        return None
    if type_.shape == tuple(data.shape):
        return torch.empty_like(data, dtype=dtype_of(type_))
    return data.new_empty(type_.shape, dtype=dtype_of(type_))
