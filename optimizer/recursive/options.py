"""The ways to divide local operators among the devices of an axis, as numbers.

A *state* is what the largest and the smallest device have of an operator (one operator where they
are alike). A *row* is a state with the number of devices of the next axis; it has options, each of
which leads to another state. States are few, however many calls there are: each is looked at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, chain, product
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipedream.graph.placements.operators import Operator, StageInput, TensorType
from pipedream.graph.placements.placement import Partial, Placement, Replicate, Shard
from pipedream.sharding.rules import largest_and_smallest, strategies, summed_types
from pipedream.sharding.rules.strategy import Strategy, fits

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
State: TypeAlias = tuple[Operator, ...]
WHOLE, SUM = 0, 1
"""The codes of Replicate and Partial; further ones are those of shards."""
_GIVEN, _GIVEN_WHOLE = "given", "given.whole"


class OptionArrays(NamedTuple):
    """Row r has the options from `first[r]` on, before `first[r + 1]`, and one slot for each input
    and then each output of the operator. The bytes of its slots begin at `bytes_at[r]`, the codes
    of the placements of an option's slots at `codes_at[option]`.
    """

    first: Ints
    bytes_at: Ints
    bytes: Floats
    slot_codes: Ints
    """The codes that options have for the slot with bytes k are `slot_codes[first_code[k] :
    first_code[k + 1]]`.
    """
    first_code: Ints
    codes_at: Ints
    codes: Ints
    summed: Floats
    """By option: bytes that are added up in the middle of the operator."""
    divides: NDArray[np.bool_]
    """By option: whether a tensor is sharded, so that each device has a part of the work."""
    dims: Ints
    """By code: the dimension that is sharded; -1 for none."""


class _Codes(dict[Placement, int]):
    """Gives each placement that is asked for a code."""

    def __missing__(self, placement: Placement) -> int:
        return self.setdefault(placement, len(self))


@dataclass
class OptionTable:
    """`chunks`: numbers of chunks that are tried for every dimension."""

    chunks: tuple[int, ...]
    states: list[State] = field(default_factory=list)
    strategies: list[Strategy] = field(default_factory=list)
    """By option."""
    _codes: _Codes = field(default_factory=lambda: _Codes({Replicate(): WHOLE, Partial(): SUM}))
    _numbers: dict[State, int] = field(default_factory=dict)
    _rows: dict[tuple[int, int, Placement | None], int] = field(default_factory=dict)
    _row_of_option: list[tuple[int, int]] = field(default_factory=list)
    """The state and the devices."""
    _next: dict[int, int] = field(default_factory=dict)
    _first: list[int] = field(default_factory=lambda: [0])
    _bytes_at: list[int] = field(default_factory=list)
    _bytes: list[float] = field(default_factory=list)
    _slot_codes: list[list[int]] = field(default_factory=list)
    _codes_at: list[int] = field(default_factory=list)
    _option_codes: list[int] = field(default_factory=list)
    _summed: list[float] = field(default_factory=list)
    _divides: list[bool] = field(default_factory=list)
    _arrays: OptionArrays | None = None

    def number(self, state: State) -> int:
        """Returns the number of a state."""
        if state not in self._numbers:
            self._numbers[state] = len(self.states)
            self.states.append(state)
        return self._numbers[state]

    def row(self, state: int, devices: int, placement: Placement | None = None) -> int:
        """Returns the row; with a placement that of something given which has it."""
        key = state, devices, placement
        if key not in self._rows:
            self._rows[key] = len(self._rows)
            self._add_row(state, devices, placement)
        return self._rows[key]

    def after(self, option: int) -> int:
        """Returns the state to which an option leads."""
        if option not in self._next:
            (state, devices), strategy = self._row_of_option[option], self.strategies[option]
            locals_ = largest_and_smallest(self.states[state], strategy, devices)
            self._next[option] = self.number(locals_)
        return self._next[option]

    def arrays(self) -> OptionArrays:
        if self._arrays is None:
            ends = accumulate(map(len, self._slot_codes), initial=0)
            self._arrays = OptionArrays(
                np.array(self._first),
                np.array(self._bytes_at, np.int64),
                np.array(self._bytes, np.float64),
                np.array(list(chain.from_iterable(self._slot_codes)), np.int64),
                np.array(list(ends), np.int64),
                np.array(self._codes_at, np.int64),
                np.array(self._option_codes, np.int64),
                np.array(self._summed, np.float64),
                np.array(self._divides),
                np.array([each.dim if isinstance(each, Shard) else -1 for each in self._codes]),
            )
        return self._arrays

    def moves(self, devices: int) -> tuple[Floats, Ints]:
        """Returns from one code to another the parts of a tensor that a device sends, and in how
        many rounds: those of rings, as in `sharding.steps`, for equal parts.
        """
        shard = np.arange(len(self._codes)) > SUM
        part, rounds = (devices - 1) / devices, devices - 1
        among_shards = shard[:, None] & shard & ~np.eye(len(shard), dtype=np.bool_)
        parts: Floats = np.where(among_shards, part / devices, 0.0)
        parts[shard, WHOLE] = parts[SUM, shard] = part
        parts[SUM, WHOLE] = 2 * part
        counts = np.where(parts > 0.0, rounds, 0)
        counts[SUM, WHOLE] = 2 * rounds
        return parts, counts

    def _add_row(self, state: int, devices: int, placement: Placement | None) -> None:
        operators, self._arrays = self.states[state], None
        largest = operators[0]
        self._bytes_at.append(len(self._bytes))
        self._bytes += [_bytes(each) for each in (*largest.inputs, *largest.outputs)]
        inner, options, codes = sum(map(_bytes, summed_types(largest))), [], self._codes
        for strategy in self._options(operators, devices, placement):
            own = list(map(codes.__getitem__, (*strategy.inputs, *strategy.outputs)))
            options.append(own)
            self._codes_at.append(len(self._option_codes))
            self._option_codes += own
            self._summed.append(inner if strategy.within == Partial() else 0.0)
            self._divides.append(max(own, default=WHOLE) > SUM)
            self.strategies.append(strategy)
            self._row_of_option.append((state, devices))
        self._slot_codes += [sorted(set(slot)) for slot in zip(*options, strict=True)]
        self._first.append(len(self._codes_at))

    def _options(
        self, operators: State, devices: int, placement: Placement | None
    ) -> Iterator[Strategy]:
        """Yields the strategies that all devices can follow, the replicated one first."""
        if placement is not None:
            yield Strategy((), (placement,))
        elif operators[0].target == _GIVEN_WHOLE:
            yield Strategy((), (Replicate(),))
        elif operators[0].target == _GIVEN:
            yield Strategy((), (Replicate(),))
            dims = range(len(operators[0].output.shape))
            for dim, chunks in product(dims, (1, *self.chunks)):
                strategy = Strategy((), (Shard(dim, chunks),))
                if all(fits(each, strategy, devices) for each in operators):
                    yield strategy
        else:
            first, *others = (strategies(each, devices, self.chunks) for each in operators)
            yield from (
                (each for each in first if all(each in other for other in others))
                if others
                else first
            )


def given_state(given: StageInput) -> State:
    """Returns the state of what the graph is given, as an operator that reads nothing. Inputs and
    gradients of outputs come whole, and random numbers are drawn alike everywhere.
    """
    free = given.role in ("parameter", "buffer")
    target = _GIVEN if free else _GIVEN_WHOLE
    return (Operator(target=target, arguments=(), inputs=(), outputs=(given.type,)),)


def _bytes(type_: TensorType | None) -> float:
    return 0.0 if type_ is None else float(math.prod(type_.shape) * type_.element_bytes)
