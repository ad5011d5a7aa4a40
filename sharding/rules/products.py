"""Products of matrices, and attention."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pipedream.graph.placements.operators import Operator, TensorType
from pipedream.sharding.rules.indices import TermSum, broadcast, divisions
from pipedream.sharding.rules.strategy import DivisionRule, Strategy

CPU_ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"

_DROPOUT_AT = {"flash": (3, 10), "efficient": (5, 9), "cudnn": (5, 13)}
"""Kernels of GPUs: at which argument they have the probability of dropout, forward, backward."""


def rules() -> dict[str, DivisionRule]:
    return {
        "aten.mm": DivisionRule(partial(_times, "mk", "kn", "mn")),
        "aten.bmm": DivisionRule(partial(_times, "bmk", "bkn", "bmn")),
        "aten.mv": DivisionRule(partial(_times, "mk", "k", "m")),
        "aten.dot": DivisionRule(partial(_times, "k", "k", "")),
        "aten.addmm": DivisionRule(partial(_plus_times, "mk", "kn", "mn")),
        "aten.baddbmm": DivisionRule(partial(_plus_times, "bmk", "bkn", "bmn")),
        "aten.addmv": DivisionRule(partial(_plus_times, "mk", "k", "m")),
        "aten.linear": DivisionRule(_linear),
        CPU_ATTENTION: DivisionRule(_attention),
        f"{CPU_ATTENTION}_backward": DivisionRule(_attention_backward),
        **{
            f"aten._scaled_dot_product_{name}_attention{end}": DivisionRule(
                partial(_kernel_attention, dropout_at, bool(end))
            )
            for name, dropouts in _DROPOUT_AT.items()
            for end, dropout_at in zip(("", "_backward"), dropouts, strict=True)
        },
    }


def draws_with_data(operator: Operator) -> bool:
    """Tells whether a forward operator draws random numbers while it computes: dropout on GPUs, and
    attention with dropout.
    """
    if operator.family == "aten.native_dropout":
        return True
    return any(
        operator.family == f"aten._scaled_dot_product_{name}_attention"
        and bool(operator.argument(forward, 0.0))
        for name, (forward, _) in _DROPOUT_AT.items()
    )


def _times(
    first: str, second: str, result: str, operator: Operator, devices: int
) -> Iterator[Strategy]:
    return divisions([first, second], [TermSum(result, [[0, 1]])], [0, 1])


def _plus_times(
    first: str, second: str, result: str, operator: Operator, devices: int
) -> Iterator[Strategy]:
    bias = broadcast(operator.inputs[0].shape, operator.output.shape, result)
    return divisions([bias, first, second], [TermSum(result, [[0], [1, 2]])], [0, 1, 2])


def _linear(operator: Operator, devices: int) -> Iterator[Strategy]:
    """Divides an input of any dimensions, a weight [outputs, inputs] and perhaps a bias."""
    batch = "abcdefgh"[: len(operator.inputs[0].shape) - 1]
    inputs, terms = [f"{batch}k", "nk"], [[0, 1]]
    if len(operator.inputs) == 3:
        inputs, terms = [*inputs, "n"], [[0, 1], [2]]
    return divisions(inputs, [TermSum(f"{batch}n", terms)], range(len(inputs)))


def _attention(operator: Operator, devices: int) -> Iterator[Strategy]:
    """Divides query, key, value, and perhaps a mask that is added; the result, and for each query
    the logarithm of the sum that its softmax divides by.
    """
    if operator.argument(3, 0.0):
        return
    inputs = _attention_letters(operator, 0, causal_at=4)
    query, all_but_values = inputs[0], [0, 1, *range(3, len(inputs))]
    outputs = [TermSum(query, [range(len(inputs))]), TermSum(query[:3], [all_but_values])]
    yield from divisions(inputs, outputs, [2])


def _attention_backward(operator: Operator, devices: int) -> Iterator[Strategy]:
    """Divides gradient, query, key, value, result, logarithms, a mask; three gradients."""
    if operator.argument(6, 0.0):
        return
    query, key, value, *mask = _attention_letters(operator, 1, causal_at=7)
    inputs = [query, query, key, value, query, query[:3], *mask]
    terms = [range(len(inputs))]
    yield from divisions(inputs, [TermSum(each, terms) for each in (query, key, value)], [0])


def _kernel_attention(
    dropout_at: int, backward: bool, operator: Operator, devices: int
) -> Iterator[Strategy]:
    """Divides batch and heads of all tensors that have both. The state of random numbers, which
    kernels hand from the forward to the backward pass, is whole everywhere, as are the numbers of
    queries and keys.
    """
    if operator.argument(dropout_at, 0.0):
        return
    batch, heads = operator.inputs[int(backward)].shape[:2]

    def letters(type_: TensorType | None) -> str:
        if type_ is None or len(type_.shape) < 3:
            return "" if type_ is None else "." * len(type_.shape)
        first = "b" if type_.shape[0] == batch > 1 else "."
        # Of keys and values there may be fewer heads, each for as many of those of queries.
        second = "h" if type_.shape[1] > 1 or heads == 1 else "."
        return first + second + "." * (len(type_.shape) - 2)

    inputs = [letters(each) for each in operator.inputs]
    every = [range(len(inputs))]
    outputs = [
        TermSum(own, every if len(own) > 2 else []) for own in map(letters, operator.outputs)
    ]
    yield from divisions(inputs, outputs)


def _attention_letters(operator: Operator, first: int, causal_at: int) -> list[str]:
    """Returns the letters of query, the first of three inputs, of key and value, and of the mask if
    there is one.

    Batch and heads can be divided; and the queries, unless each sees those before it alone.
    """
    query, key = (operator.inputs[first + k].shape for k in (0, 1))
    letters = "bh." if operator.argument(causal_at, False) else "bhs"
    whole = (*query[:3], key[2])
    of_key = broadcast(key[:2], query[:2], letters[:2]) + ".."
    masks = operator.inputs[6 if first else 3 :]
    return [f"{letters}.", of_key, of_key] + [
        broadcast(mask.shape, whole, f"{letters}.") for mask in masks
    ]
