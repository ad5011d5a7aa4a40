"""Operators that look something up: embeddings, the loss of a class, gather, index_select."""

from __future__ import annotations

from collections.abc import Iterator

from pipedream.graph.placements.operators import Operator
from pipedream.sharding.rules.indices import TermSum, divisions, letters_of
from pipedream.sharding.rules.reductions import SUM
from pipedream.sharding.rules.strategy import DivisionRule, Strategy


def rules() -> dict[str, DivisionRule]:
    table = {
        "embedding": DivisionRule(_embedding),
        "embedding_dense_backward": DivisionRule(_embedding_backward),
        "nll_loss_forward": DivisionRule(_class_loss),
        "nll_loss2d_forward": DivisionRule(_class_loss),
        "nll_loss_backward": DivisionRule(_class_loss_backward),
        "nll_loss2d_backward": DivisionRule(_class_loss_backward),
        "gather": DivisionRule(_gather),
        "index_select": DivisionRule(_index_select),
    }
    return {f"aten.{name}": rule for name, rule in table.items()}


def _embedding(operator: Operator, devices: int) -> Iterator[Strategy]:
    """Divides word vectors, but not the vocabulary, and numbers of words."""
    numbers = letters_of(operator.inputs[1].shape)
    output = TermSum(f"{numbers}z", [[0, 1]])
    yield from divisions([".z", numbers], [output], [0])


def _embedding_backward(operator: Operator, devices: int) -> Iterator[Strategy]:
    """Divides words, unless gradients are divided by how often each occurs."""
    shape = operator.inputs[1].shape
    numbers = "." * len(shape) if operator.argument(4, False) else letters_of(shape)
    yield from divisions([f"{numbers}z", numbers], [TermSum(".z", [[0, 1]])], [0])


def _class_loss(operator: Operator, devices: int) -> Iterator[Strategy]:
    """Logarithms of probabilities, classes, and perhaps weights of the classes; the loss, and the
    sum of the weights that the mean divides by.
    """
    reduction = operator.integer(3)
    if reduction == 1 or len(operator.inputs[0].shape) < 2:
        return
    data, target = _class_letters(operator, 0)
    inputs = [data, target, *("." for _ in operator.inputs[2:])]
    numbers = [range(len(inputs))]
    loss = TermSum("" if reduction == SUM else target, numbers)
    yield from divisions(inputs, [loss, TermSum("", numbers)])


def _class_loss_backward(operator: Operator, devices: int) -> Iterator[Strategy]:
    """Divides gradient, logarithms, classes, weights, and the sum of the whole batch's."""
    if len(operator.inputs[1].shape) < 2:
        return
    data, target = _class_letters(operator, 1)
    gradient = "" if operator.integer(4) else target
    rest = ["." * len(each.shape) for each in operator.inputs[3:]]
    inputs = [gradient, data, target, *rest]
    yield from divisions(inputs, [TermSum(data, [range(len(inputs))])], [0])


def _class_letters(operator: Operator, data_at: int) -> tuple[str, str]:
    shape = operator.inputs[data_at].shape
    target = letters_of((shape[0], *shape[2:]))
    return f"{target[0]}.{target[1:]}", target


def _gather(operator: Operator, devices: int) -> Iterator[Strategy]:
    """Divides the dimensions in which each index reads what is at its own place."""
    source, indices = (each.shape for each in operator.inputs)
    if not source or len(source) != len(indices):
        return
    dim = operator.integer(1) % len(source)
    letters = "".join(
        "." if d == dim or source[d] != indices[d] else letter
        for d, letter in enumerate(letters_of(source))
    )
    index_letters = letters[:dim] + letters_of([indices[dim]], len(source)) + letters[dim + 1 :]
    yield from divisions([letters, index_letters], [TermSum(index_letters, [[0, 1]])], [0])


def _index_select(operator: Operator, devices: int) -> Iterator[Strategy]:
    source, indices = (each.shape for each in operator.inputs)
    if not source or len(indices) != 1:
        return
    dim = operator.integer(1) % len(source)
    letters = letters_of(source)
    before, after = letters[:dim], letters[dim + 1 :]
    index_letters = letters_of(indices, len(source))
    inputs = [f"{before}.{after}", index_letters]
    yield from divisions(inputs, [TermSum(f"{before}{index_letters}{after}", [[0, 1]])], [0])
