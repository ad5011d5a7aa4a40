"""Rules: how each ATen operator can be divided among the devices of a mesh axis. No torch.

`strategies(operator, devices)` gives the ways, `local_operator` what a device then executes. An
operator without a rule is divided as was found by running it (`discovered`), or all devices do the
same. The backward pass needs no rules of its own kind, since it consists of ATen operators too. In
a few ways the devices add something up in the middle of the operator (`summed_types`).

`strategy`: what a rule is. `indices`: the rules of operators that are loops over indices, which is
nearly all. `views`, `pieces`: chunks. The other files are tables by kind of operator. Begin with
`indices`, then `products`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from pipedream.graph.placements.operators import Operator, TensorType
from pipedream.sharding.rules import (
    convolutions,
    discovered,
    images,
    lookups,
    normalizations,
    pieces,
    pointwise,
    products,
    recurrent,
    reductions,
    views,
)
from pipedream.sharding.rules.strategy import (
    DivisionRule,
    Strategy,
    fits,
    in_chunks,
    is_even,
    local_type,
    replicated,
)

_PARTS = (
    *(convolutions, images, lookups, normalizations),
    *(pieces, pointwise, products, recurrent, reductions, views),
)
RULES: dict[str, DivisionRule] = {
    name: rule for part in _PARTS for name, rule in part.rules().items()
}
"""By family: the name of an operator without its overload."""
assert len(RULES) == sum(len(part.rules()) for part in _PARTS), "two rules for an operator"


@lru_cache(maxsize=100_000)
def strategies(
    operator: Operator, devices: int, chunks: tuple[int, ...] = ()
) -> tuple[Strategy, ...]:
    """Returns all ways to divide the operator among so many devices, the replicated one first.

    Dimensions are also sharded in these numbers of chunks, where that is the same to the operator.
    """
    rule, candidates = _rule(operator), [replicated(operator)]
    unchunked = rule.divisions(operator, devices)
    candidates += (
        each for each in in_chunks(unchunked, chunks) if rule.allows(operator, each, devices)
    )
    return tuple(dict.fromkeys(each for each in candidates if fits(operator, each, devices)))


def summed_types(operator: Operator) -> tuple[TensorType, ...]:
    """Returns the types of what devices add up in the operator's middle, if its strategy does."""
    return _rule(operator).sums(operator)


def local_operator(operator: Operator, strategy: Strategy, devices: int, index: int) -> Operator:
    """Returns what the device with this index executes: the operator on its local tensors. Where
    the strategy adds up `within` the operator, it is executed so that it does.

    Where arguments are sizes they are local, too. Execute a `view` as `reshape`: local tensors may
    lie in memory in another way than the whole.
    """
    inputs = tuple(
        local_type(type_, placement, devices, index)
        for type_, placement in zip(operator.inputs, strategy.inputs, strict=True)
    )
    outputs = tuple(
        type_ and local_type(type_, placement, devices, index)
        for type_, placement in zip(operator.outputs, strategy.outputs, strict=True)
    )
    local = operator.model_copy(update={"inputs": inputs, "outputs": outputs})
    return local.with_arguments(dict(_rule(operator).arguments(operator, local)))


def largest_and_smallest(
    operators: Iterable[Operator], strategy: Strategy, devices: int
) -> tuple[Operator, ...]:
    """Returns of each of these operators what the devices with the largest and the smallest part
    execute; those that are alike once.
    """
    found = [
        local_operator(each, strategy, devices, index)
        for each in operators
        for index in ((0,) if is_even(each, strategy, devices) else (0, devices - 1))
    ]
    return tuple(dict.fromkeys(found)) if len(found) > 1 else tuple(found)


def _rule(operator: Operator) -> DivisionRule:
    return RULES.get(operator.family, discovered.RULE)
