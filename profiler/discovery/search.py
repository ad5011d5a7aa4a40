"""All ways to divide one operator, found by running it on parts of its inputs.

After EasyDist (section 3, annotation of operators): dimensions of inputs that have one size are
divided together or apart, each combination is tried, and what the devices compute is put together.
In place of annotations the ways are placements. A tensor may also be given in terms of a sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, combinations, islice, product

from pipedream.capture.programs.trial import CannotTry, Trial
from pipedream.graph.placements.operators import Operator, TensorType, Way
from pipedream.graph.placements.placement import Partial, Placement, Placements, Replicate, Shard
from pipedream.profiler.discovery.sizes import ALL, OF_LARGE, OF_SMALL, with_small_sizes
from pipedream.sharding.rules.discovered import as_way, is_shape
from pipedream.sharding.rules.strategy import Strategy, fits

R, P = Replicate(), Partial()
_DEVICES = (2, 3, 5)
"""Of these numbers of devices the least and the largest that a tensor allows are tried: the parts
of many are uneven, without which a convolution that leaves out positions looks divisible.
"""
_MOST_COMBINATIONS = 5000
_MOST_ELEMENTS = 2**20
"""Of the tensors of an operator that is tried in its true sizes; ranks try all that they use."""
_MOST_SMALL_ELEMENTS = 2**22
_searched: dict[Operator, tuple[Strategy, ...]] = {}
"""By the operator that was tried, in small sizes, which many operators of a model come to."""


def find_ways(
    operator: Operator, first: int = 0, begins: Callable[[int], None] = lambda number: None
) -> Iterator[Way]:
    """Yields the ways in which any number of devices can divide it, of the combinations from the
    `first` one on. `begins` is called with the number of each before it is tried, which may end the
    process. Raises CannotTry.
    """
    if operator.writes:
        raise CannotTry("it writes into its inputs")
    if not operator.inputs:
        raise CannotTry("it has no inputs")
    small, trials = _trials(operator)
    whole = None
    if small != operator and _elements(operator) <= _MOST_ELEMENTS:
        whole = Trial(operator, seed=0)
    for strategy in _strategies(small, trials, first, begins):
        if whole is None or not fits(operator, strategy, 2) or whole.gives(strategy, 2):
            yield as_way(strategy)


def _strategies(
    small: Operator, trials: Sequence[Trial], first: int, begins: Callable[[int], None]
) -> Iterator[Strategy]:
    """Yields those that the trials show, of operators that come to this one searched but once."""
    if small in _searched:
        yield from _searched[small]
        return
    strategies, unread, divided = list[Strategy](), _unread(small, trials[0]), set[Placements]()
    for number, strategy in enumerate(islice(_candidates(small), _MOST_COMBINATIONS)):
        read = tuple(R if k in unread else each for k, each in enumerate(strategy.inputs))
        if number < first or (read != strategy.inputs and read in divided):
            continue
        begins(number)
        found = _outcome(strategy, trials)
        if found is not None:
            divided.add(found.inputs)
            strategies.append(found)
            yield found
    if not first:
        _searched[small] = tuple(strategies)


def _unread(operator: Operator, trial: Trial) -> set[int]:
    """Returns the inputs whose values do not matter, such as statistics that are not used. Their
    shapes may.
    """
    whole: Placements = (R,) * len(operator.inputs)
    results: Placements = (R,) * len(operator.outputs)
    unread = set()
    for number, type_ in enumerate(operator.inputs):
        if _can_be_terms(type_):
            inputs = (*whole[:number], P, *whole[number + 1 :])
            if trial.outputs(Strategy(inputs, results), min(_DEVICES)) == results:
                unread.add(number)
    return unread


def _trials(operator: Operator) -> tuple[Operator, list[Trial]]:
    """Returns the operator in sizes with which it can be run, and trials of it."""
    sizes = [with_small_sizes(operator, each) for each in (OF_LARGE, OF_SMALL, ALL)]
    if _elements(operator) <= _MOST_SMALL_ELEMENTS:
        sizes.append(operator)
    *first, last = dict.fromkeys(sizes)
    for each in first:
        with suppress(CannotTry):
            return each, [Trial(each, seed) for seed in (0, 1)]
    return last, [Trial(last, seed) for seed in (0, 1)]


def _outcome(strategy: Strategy, trials: Sequence[Trial]) -> Strategy | None:
    """Returns the strategy with the placements of outputs that all trials give."""
    known: tuple[Placement | None, ...] | None = None
    for trial, devices in product(trials, _device_counts(strategy, trials[0].operator)):
        outputs = trial.outputs(strategy, devices)
        if outputs is None or None in outputs or (known is not None and outputs != known):
            return None
        known = outputs
    placements = tuple(each for each in known or () if each is not None)
    found = Strategy(strategy.inputs, placements)
    return found if any(each != R for each in found.outputs) else None


def _device_counts(strategy: Strategy, operator: Operator) -> list[int]:
    """Returns numbers of devices that have something each of all that is divided."""
    placements = (*strategy.inputs, *strategy.outputs)
    placed = zip(placements, (*operator.inputs, *operator.outputs), strict=True)
    sizes = [t.shape[each.dim] for each, t in placed if t is not None and isinstance(each, Shard)]
    counts = [devices for devices in _DEVICES if devices <= min(sizes, default=devices)]
    return [counts[0], counts[-1]]


def _candidates(operator: Operator) -> Iterator[Strategy]:
    """Yields placements of the inputs; of outputs that arguments have the shape of, guesses."""
    whole: Placements = (R,) * len(operator.inputs)
    for inputs in chain([whole], _sharded(operator.inputs), _partial(operator.inputs)):
        for outputs in _guesses(operator):
            yield Strategy(inputs, outputs)


def _sharded(types: Sequence[TensorType]) -> Iterator[Placements]:
    """Yields placements in which dimensions of one size are divided, and one of the other inputs
    may be terms of a sum, as the bias of a product whose terms are divided must be.
    """
    sizes = sorted({size for type_ in types for size in type_.shape})
    for size in (each for each in sizes if each >= min(_DEVICES)):
        options: list[list[Placement]] = [
            [R, *(Shard(dim) for dim, own in enumerate(type_.shape) if own == size)]
            for type_ in types
        ]
        for placements in product(*options):
            whole = [number for number, each in enumerate(placements) if each == R]
            if len(whole) == len(types):
                continue
            yield placements
            for number in whole:
                if _can_be_terms(types[number]):
                    yield (*placements[:number], P, *placements[number + 1 :])


def _partial(types: Sequence[TensorType]) -> Iterator[Placements]:
    """Yields placements in which inputs are terms of a sum."""
    linear = [number for number, type_ in enumerate(types) if _can_be_terms(type_)]
    for count in range(1, len(linear) + 1):
        for chosen in combinations(linear, count):
            yield tuple(P if number in chosen else R for number in range(len(types)))


def _can_be_terms(type_: TensorType) -> bool:
    return type_.dtype.startswith(("float", "bfloat", "complex"))


def _guesses(operator: Operator) -> Iterator[Placements]:
    """Yields placements of the outputs; other than whole for those whose shape is an argument."""
    whole: Placements = (R,) * len(operator.outputs)
    yield whole
    for number, type_ in enumerate(operator.outputs):
        if type_ is not None and any(is_shape(each, type_) for each in operator.arguments):
            for dim, size in enumerate(type_.shape):
                if size >= min(_DEVICES):
                    yield (*whole[:number], Shard(dim), *whole[number + 1 :])


def _elements(operator: Operator) -> int:
    types = (*operator.inputs, *(each for each in operator.outputs if each is not None))
    return sum(math.prod(each.shape) for each in types)
