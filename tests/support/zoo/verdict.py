"""Whether two ways of training a module have learned the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipedream.graph.errors import UserError
from zoo.learned import Learned, Named

CLOSE = {torch.float64: 1e-9, torch.float32: 2e-4}
"""The largest difference that counts as equal, in parts of the largest number of a tensor."""


@dataclass(frozen=True)
class Verdict:
    """`word`: equal, refused or WRONG; with `difference`, the largest in parts of what there is."""

    word: str
    line: str = ""
    difference: float = 0.0

    @property
    def is_wrong(self) -> bool:
        return self.word == "WRONG"

    def __str__(self) -> str:
        if self.word == "equal":
            return f"equal {self.difference:.0e}" if self.difference else "equal"
        return f"{self.word}: {self.line}"


def judge(expected: Learned, run: Callable[[], Learned], dtype: torch.dtype) -> Verdict:
    """Compares what `run` learns with what is expected; a UserError of one line is a refusal."""
    try:
        found = run()
    except UserError as error:
        line = error.format_message()
        return Verdict("refused" if "\n" not in line else "WRONG", line)
    except Exception as error:  # what no user should see
        reason = (str(error).strip() or "no message").splitlines()[0]
        return Verdict("WRONG", f"ends in {type(error).__name__}: {reason}")
    worst = 0.0
    for what, known, own in _pairs(expected, found):
        difference = distance(known, own)
        if not difference <= CLOSE[dtype]:
            return Verdict("WRONG", f"{what} is off by {difference:.1e}", difference)
        worst = max(worst, difference)
    return Verdict("equal", difference=worst)


def _pairs(expected: Learned, found: Learned) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
    yield "the losses", _row(expected.losses), _row(found.losses)
    for update, (known, own) in enumerate(zip(expected.outputs, found.outputs, strict=True)):
        for index in range(max(len(known), len(own))):
            yield f"output {index} of update {update}", _at(known, index), _at(own, index)
    for update, (of, its) in enumerate(zip(expected.gradients, found.gradients, strict=True)):
        yield from _named(f"the gradient in update {update} of", of, its)
    yield from _named("buffer", expected.buffers, found.buffers)
    yield from _named("parameter", expected.parameters, found.parameters)


def _named(
    what: str, known: Named, own: Named
) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
    for name in sorted(known.keys() | own.keys()):
        yield f"{what} {name}", known.get(name), own.get(name)


def _row(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def _at(tensors: Sequence[Tensor], index: int) -> Tensor | None:
    return tensors[index] if index < len(tensors) else None


def distance(known: Tensor | None, own: Tensor | None) -> float:
    """The largest difference in parts of the largest number; infinite for other shapes or types.
    None is zero, as gradients have it.
    """
    if known is None or own is None:
        given = own if known is None else known
        return 0.0 if given is None or not given.any() else float("inf")
    if known.shape != own.shape or known.dtype != own.dtype:
        return float("inf")
    if not known.numel():
        return 0.0
    wide = torch.complex128 if known.is_complex() else torch.float64
    known, own = known.to(wide), own.to(wide)
    if not torch.equal(known.isfinite(), own.isfinite()):
        return float("inf")
    known, own = known.nan_to_num(), own.nan_to_num()
    largest = float((known - own).abs().max())
    return largest / max(float(known.abs().max()), 1e-6)
