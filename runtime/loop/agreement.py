"""All ranks are to do the same, with the same model and minibatch, in the pipeline's precision."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipedream.capture.checks.equivalence import as_double
from pipedream.capture.compute_settings import Precision
from pipedream.comm.messages import PeerLost
from pipedream.graph.errors import UserError
from pipedream.runtime.loop.gathering import of_all_ranks

_CHECKED = 3
"""The first minibatches, which are compared between the ranks."""

_CHECKED_AGAIN = 100
"""Of those that follow, one in so many is compared, too."""


class Agreement:
    """Compares the ranks of a `model`: a few numbers at each check; values only where a parameter
    is new, and those of some minibatches. `trained`: the parameters that this rank has trained, the
    only ones that it has up to date unless all were `gathered`.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self.compared: dict[int, nn.Parameter] = {}
        self.trained: dict[int, nn.Parameter] | None = None
        self.gathered = True
        self.checks = 0

    def check(
        self,
        what: str,
        texts: Sequence[str],
        inputs: Iterable[Tensor],
        own: Iterable[nn.Parameter],
    ) -> None:
        """Raises UserError on all ranks if one of them is to do something else, or with a model
        that was captured as other `texts`, or has other weights or other inputs; or if a parameter
        of its `own` stages was trained by another rank so far.
        """
        self.checks += 1
        fresh = {
            name: parameter.detach()
            for name, parameter in self.model.named_parameters()
            if id(parameter) not in self.compared
        }
        number = sum(_number(text) for text in (what, *texts)) >> 8
        stale = self._is_stale(own)
        here = torch.tensor([number, -number, len(fresh), stale], device=self.device)
        largest = _largest(here)
        if not torch.equal(largest[:2], here[:2]):
            raise UserError(self._difference(what, texts))
        if largest[3]:
            raise UserError(
                "the model was changed so that a parameter is in the stage of another rank, too:"
                " call gather() of the pipeline before that"
            )
        if largest[2]:
            self._compare_models(fresh)
        if self.checks <= _CHECKED or self.checks % _CHECKED_AGAIN == 0:
            remedy = "no sampler may divide the data among the ranks"
            self._compare("minibatches", inputs, remedy)

    def note_trained(self, parameters: Iterable[nn.Parameter]) -> None:
        """Says that from now on a rank has only these up to date."""
        self.trained = {id(parameter): parameter for parameter in parameters}
        self.gathered = False

    def note_gathered(self) -> None:
        """Says that all ranks have everything up to date."""
        self.gathered = True

    def _is_stale(self, own: Iterable[nn.Parameter]) -> bool:
        if self.trained is None or self.gathered:
            return False
        old = self.compared.keys() - self.trained.keys()
        return any(id(parameter) in old for parameter in own)

    def _compare_models(self, fresh: Mapping[str, Tensor]) -> None:
        """Compares what is new: of the rest a rank has only its own stages up to date."""
        placeholder = torch.zeros(())
        values = [fresh.get(name, placeholder) for name, _ in self.model.named_parameters()]
        if self.compared:
            remedy = "make new parameters alike on all ranks: seed torch, or gather() before"
        else:
            remedy = "call torch.manual_seed before you make it"
            values += self.model.buffers()
        self._compare("models", values, remedy)
        self.compared = {id(parameter): parameter for parameter in self.model.parameters()}

    def _compare(self, what: str, tensors: Iterable[Tensor], remedy: str) -> None:
        """Raises UserError on all ranks unless each has tensors of the same sums."""
        sums = torch.tensor([float(as_double(tensor).sum()) for tensor in tensors]).nan_to_num()
        own = torch.cat([sums, -sums]).to(self.device)
        if not torch.equal(_largest(own), own):
            raise UserError(f"the ranks have different {what}: {remedy}")

    def _difference(self, what: str, texts: Sequence[str]) -> str:
        """Describes, to all ranks alike, where a rank differs from rank 0."""
        here: dict[str, Any] = {"the call is": what}
        for name, parameter in self.model.named_parameters():
            here[f"{name} learns:"] = parameter.requires_grad
        for name, module in self.model.named_modules():
            here[f"{name or 'the model'} is in training mode:"] = module.training
        here["microbatches:"] = len(texts)
        every: list[dict[str, Any]] = of_all_ranks(here)
        for rank, there in enumerate(every[1:], start=1):
            for key in {**every[0], **there}:
                one, other = every[0].get(key, "missing"), there.get(key, "missing")
                if one != other:
                    return (
                        f"the ranks have different models or calls: {key} {one} on rank 0,"
                        f" {other} on rank {rank}: change the model alike on all ranks"
                    )
        return (
            "the ranks have different models: the same calls run other operators: give their"
            " modules the same attributes on all ranks"
        )


def check_precision(precision: Precision) -> None:
    """Raises UserError if a loop calls a pipeline in another precision than it has."""
    kind, own = precision.device.type, precision.autocast
    theirs = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
    if torch.is_autocast_enabled(kind) and theirs != own:
        remedy = f"give it autocast={theirs!r} when you make it, or call it outside"
        if theirs == "float16":
            remedy = "use bfloat16: gradients are there before a scaler scales the loss"
        raise UserError(
            f"the pipeline is called within torch.autocast of {theirs}, and has types of its"
            f" own: {remedy}"
        )


def _largest(own: Tensor) -> Tensor:
    largest = own.clone()
    try:
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    except RuntimeError as error:
        raise PeerLost("another rank does not answer") from error
    return largest


@lru_cache(maxsize=256)
def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
