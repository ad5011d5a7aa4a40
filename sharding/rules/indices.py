"""The strategies of operators that are loops over indices, as in Einstein's summation.

Each dimension of inputs and outputs has the letter of its index, or a dot if it cannot be divided.
Each output is a sum of terms, products of some of the inputs. `addmm`, bias + first @ second:

    inputs    n, mk, kn
    output    mn = (0) + (1)(2)

Divide m:                   bias R     first S(0)   second R      output S(0)
Divide n:                   bias S(0)  first R      second S(1)   output S(1)
Divide k, which is summed:  bias P     first S(1)   second S(0)   output P
A sum goes through:         bias P     first P      second R      output P
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from string import ascii_lowercase

from pipedream.graph.placements.placement import Placement, Shard
from pipedream.sharding.rules.strategy import P, R, Strategy


@dataclass(frozen=True)
class TermSum:
    """An output: the letters of its dimensions, and the numbers of the inputs in each term."""

    letters: str
    terms: Sequence[Sequence[int]]

    def reads(self, letter: str, inputs: Sequence[str]) -> bool:
        return any(letter in inputs[number] for term in self.terms for number in term)


def divisions(
    inputs: Sequence[str], outputs: Sequence[TermSum], linear: Collection[int] = ()
) -> Iterator[Strategy]:
    """Yields one strategy for each index, and one for each way in which partial inputs pass
    through.

    `linear`: the inputs of which each term that has them is a linear function.
    """
    letters = sorted({*"".join(inputs), *"".join(each.letters for each in outputs)} - {"."})
    for letter in letters:
        strategy = _divided(letter, inputs, outputs, linear)
        if strategy is not None:
            yield strategy
    for size in range(1, len(linear) + 1):
        for partial in combinations(sorted(linear), size):
            strategy = _partial(set(partial), len(inputs), outputs)
            if strategy is not None:
                yield strategy


def letters_of(shape: Sequence[int], first: int = 0) -> str:
    """Returns a letter for each dimension; a dot for those of one element."""
    letters = ascii_lowercase[first : first + len(shape)]
    return "".join("." if size == 1 else each for each, size in zip(letters, shape, strict=True))


def broadcast(shape: Sequence[int], to: Sequence[int], letters: str) -> str:
    """Returns the letters of an input that is broadcast to a shape with these letters."""
    skipped = len(to) - len(shape)
    assert skipped >= 0, (shape, to)
    return "".join(
        letter if size == whole else "."
        for size, whole, letter in zip(shape, to[skipped:], letters[skipped:], strict=True)
    )


def _divided(
    letter: str, inputs: Sequence[str], outputs: Sequence[TermSum], linear: Collection[int]
) -> Strategy | None:
    """Sums over the index are partial, and so must be what is added to them."""
    placed: list[Placement] = [_shard(letter, each) for each in inputs]
    results: list[Placement] = []
    for output in outputs:
        result = _shard(letter, output.letters)
        if result == R and output.reads(letter, inputs):
            result = P
            for term in output.terms:
                if any(letter in inputs[number] for number in term):
                    continue
                factor = next((number for number in term if number in linear), None)
                if factor is None:
                    return None
                placed[factor] = P
        results.append(result)
    return Strategy(tuple(placed), tuple(results))


def _partial(partial: set[int], inputs: int, outputs: Sequence[TermSum]) -> Strategy | None:
    results: list[Placement] = []
    for output in outputs:
        counts = {len(partial.intersection(term)) for term in output.terms}
        if counts not in ({0}, {1}, set()):
            return None
        results.append(P if counts == {1} else R)
    if P not in results:
        return None
    return Strategy(tuple(P if n in partial else R for n in range(inputs)), tuple(results))


def _shard(letter: str, letters: str) -> Placement:
    assert letters.count(letter) <= 1, (letter, letters)
    return Shard(letters.index(letter)) if letter in letters else R
