"""The steps of the backward pass: from the gradient of what came out of a redistribution to that of
what went in.

How the gradient of a value is placed on an axis:

    value       its gradient
    Replicate   Replicate, if each device has all of it; Partial, if each has a term of the sum
    Shard       Shard, alike
    Partial     Replicate: each term counts as the sum does

So the gradient of a partial value is the gradient of the sum, on every device: where each device
has all of it, the backward pass of an all-reduce does nothing. (torch's functional all_reduce sums
there once more, which is for losses that each device adds its own term to: here that is a Partial
gradient.)
"""

from __future__ import annotations

from pipedream.graph.sharding.placement import Partial, Placement, Placements, Replicate, Shard
from pipedream.graph.sharding.steps import Collective, MeshTensor, Step, make_step

ADJOINTS: dict[tuple[Collective, type[Placement]], Collective | None] = {
    (Collective.ALL_GATHER, Replicate): Collective.SLICE,
    (Collective.ALL_GATHER, Partial): Collective.REDUCE_SCATTER,
    (Collective.ALL_TO_ALL, Shard): Collective.ALL_TO_ALL,
    (Collective.REDUCE_SCATTER, Shard): Collective.ALL_GATHER,
    (Collective.ALL_REDUCE, Replicate): None,
    (Collective.ALL_REDUCE, Partial): Collective.ALL_REDUCE,
    (Collective.SLICE, Shard): Collective.ALL_GATHER,
    (Collective.KEEP_ONE, Replicate): None,
    (Collective.ZERO_PAD, Replicate): Collective.SLICE,
}
"""By the step of the forward pass, and how the gradient of its output is placed on its axis."""


def adjoint(tensor: MeshTensor, steps: tuple[Step, ...], gradient: Placements) -> tuple[Step, ...]:
    """The steps that turn the gradient of the output into that of the input, the last step's first.

    `gradient`: how the gradient of the output is placed. That of the input is then placed as the
    table above says, Replicate for replicated values, except that an axis without a step keeps its
    Partial.
    """
    if steps:
        _check_gradient(steps[-1].target, gradient)
    backward = []
    for step in reversed(steps):
        collective = ADJOINTS[step.collective, type(gradient[step.axis])]
        before = step.source[step.axis]
        made = make_step(
            tensor, gradient, step.axis, before if isinstance(before, Shard) else Replicate()
        )
        assert (None if made is None else made.collective) is collective, (step, gradient)
        if made is not None:
            backward.append(made)
            gradient = made.target
    return tuple(backward)


def _check_gradient(value: Placements, gradient: Placements) -> None:
    for placed, its in zip(value, gradient, strict=True):
        if isinstance(placed, Shard):
            assert its == placed, f"the gradient of {placed} is placed as {its}"
        else:
            allowed = (Replicate,) if isinstance(placed, Partial) else (Replicate, Partial)
            assert isinstance(its, allowed), f"the gradient of {placed} is placed as {its}"
