"""Weights as versions: a forward pass uses one, an update makes the next, none changes in flight.

This is weight stashing (PipeDream, SOSP 2019, section 3.3) without saving and restoring: the graph
of a forward pass keeps the tensors of its version until its backward pass is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from pipedream.comm.device.copies import copy_all
from pipedream.runtime.optim.divided import DividedParameters
from pipedream.runtime.optim.error_feedback import ErrorFeedback
from pipedream.runtime.optim.prediction import Prediction


@dataclass(eq=False)
class Version:
    """One version of a stage's parameters; `users` backward passes on it are still to be run.

    `number` counts updates from the start of the run. With `ahead`, the tensors are predicted: as
    expected that many updates later.
    """

    number: int
    tensors: dict[str, torch.Tensor]
    users: int = 0
    ahead: int = 0


class Weights:
    """The parameters of one stage, the versions of them that are still needed, and their optimizer.

    The optimizer always works on the newest version. Where a minibatch still needs that one, an
    update first moves the parameters to other memory, that of a version nobody needs any more if
    there is one, and leaves the old memory to the old version.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        updates: int = 0,
        prediction: Prediction | None = None,
        divided: DividedParameters | None = None,
    ) -> None:
        """`updates`: the number of updates made so far. `divided`: if this replica updates its part
        of the parameters alone.
        """
        self.parameters = dict(parameters)
        self.gradients: dict[str, torch.Tensor] = {}
        self.spare: list[dict[str, torch.Tensor]] = []
        self.older: list[Version] = []
        self.current = Version(updates, self._snapshot())
        self.prediction, self.divided = prediction, divided
        self.feedback: ErrorFeedback | None = None
        self.expected: Mapping[int, int] = {}
        self.peak_versions = 1

    def begin(self) -> None:
        """Prepares for a segment, with nothing in flight."""
        self.expected, self.current.users = {}, 0
        if self.feedback is not None:
            self.feedback.begin()

    def expect(self, uses: Mapping[int, int]) -> None:
        """Sets how many minibatches of the segment run on each version, with those already done.

        A version is kept until all of them are done: 2BW and vertical sync begin on one that is
        not the newest any more. Call again if the segment is replaced.
        """
        for version in (self.current, *self.older):
            if not version.ahead:
                number = version.number
                version.users += uses.get(number, 0) - self.expected.get(number, 0)
                self._forget_unused(version)
        self.expected = uses

    def acquire(self, number: int, ahead: int = 0) -> Version:
        """Returns that version, for a forward pass; `release` it after the backward pass.

        With `ahead` (the newest version only): its weights as predicted that many updates ahead,
        as a version of its own that does not count as a use of the newest.
        """
        if ahead:
            assert self.prediction is not None
            assert number == self.current.number
            memory = self.spare.pop() if self.spare else {}
            version = Version(number, self.prediction.ahead(ahead, memory), users=1, ahead=ahead)
            self.older.append(version)
            self.peak_versions = max(self.peak_versions, 1 + len(self.older))
            return version
        (version,) = (v for v in (self.current, *self.older) if v.number == number and not v.ahead)
        assert version.users > 0, f"version {number} is not expected to be used any more"
        return version

    def release(self, version: Version) -> None:
        """Ends a use of the version, after the backward pass."""
        version.users -= 1
        self._forget_unused(version)

    def _forget_unused(self, version: Version) -> None:
        if version.users == 0 and version is not self.current:
            self.older.remove(version)
            self.spare.append(version.tensors)

    @contextmanager
    def accumulating(self, version: Version) -> Iterator[None]:
        """Makes a backward pass in here add its gradients to those of the round.

        Autograd does so in place, parameter by parameter, so two full sets never exist at once.
        """
        for name, tensor in version.tensors.items():
            tensor.grad = self.gradients.pop(name, None)
        yield
        for name, tensor in version.tensors.items():
            if tensor.grad is not None:
                self.gradients[name] = tensor.grad
                tensor.grad = None

    def add(self, name: str, gradient: torch.Tensor, own: bool) -> None:
        """Adds a gradient of a parameter to that of the round, in place.

        The first one is taken as it is if its memory is its `own` and laid out like the parameter.
        """
        known, parameter = self.gradients.get(name), self.parameters[name]
        if known is not None:
            known.add_(gradient)
        elif own and gradient.stride() == parameter.stride():
            self.gradients[name] = gradient
        else:
            self.gradients[name] = torch.empty_like(parameter.data).copy_(gradient)

    def take_gradients(self, divisor: int) -> dict[str, torch.Tensor]:
        """Returns the mean gradients of the round, a sum of `divisor`; the next round begins. If
        updates are divided, those of this replica's parts.
        """
        summed, self.gradients = self.gradients, {}
        gradients = {name: summed[name] for name in self.parameters if name in summed}
        if self.divided is not None:
            gradients = self.divided.own_gradients(gradients)
        if divisor > 1 and gradients:
            torch._foreach_div_(list(gradients.values()), divisor)
        return gradients

    def update(
        self, gradients: Mapping[str, torch.Tensor], step: Callable[[], None], number: int
    ) -> None:
        """Makes version `number`, the next one, from the mean gradients of a round.

        `step` changes the parameters by their gradients, which it leaves unset; or this replica's
        parts of them, if they are divided.
        """
        assert number == self.current.number + 1
        if self.current.users:
            self.older.append(self.current)
            self.peak_versions = max(self.peak_versions, 1 + len(self.older))
            self._move()
        updated = self.parameters
        if self.divided is not None:
            self.divided.follow()
            updated = self.divided.parts
        for name, parameter in updated.items():
            parameter.grad = gradients.get(name)
        if self.feedback is not None:
            self.feedback.expect(number, self._stood())
        step()
        self.current = Version(number, self._snapshot(), self.expected.get(number, 0))

    def _move(self) -> None:
        """Gives the parameters memory of their own; their old memory stays with the old version."""
        memory = self.spare.pop() if self.spare else {}
        fresh = {
            name: memory[name].detach() if name in memory else torch.empty_like(parameter.data)
            for name, parameter in self.parameters.items()
        }
        copy_all((fresh[name], parameter.data) for name, parameter in self.parameters.items())
        for name, parameter in self.parameters.items():
            parameter.data = fresh[name]

    def _stood(self) -> dict[nn.Parameter, torch.Tensor]:
        """Returns the parameters as they are, where they are kept as an older version anyway."""
        if self.divided is not None or not self.older or self.older[-1] is not self.current:
            return {}
        held = self.current.tensors
        return {each: held[name].detach() for name, each in self.parameters.items()}

    def _snapshot(self) -> dict[str, torch.Tensor]:
        """Leaves of the autograd graph over the parameters' present memory.

        `.data`, not `.detach()`: a later update must not count as a write into this version.
        """
        return {
            name: parameter.data.requires_grad_(parameter.requires_grad)
            for name, parameter in self.parameters.items()
        }
