"""Tensors cut in pieces along a dimension, and put together: split, slice, select, cat, stack.

All other dimensions can be divided. So can the dimension itself if the n pieces are equal: in n
chunks it is divided as each of the pieces is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from pipedream.graph.placements.operators import Operator, TensorType
from pipedream.graph.placements.placement import Shard
from pipedream.sharding.rules.indices import TermSum, divisions, letters_of
from pipedream.sharding.rules.strategy import Arguments, DivisionRule, P, Strategy, output_shape


def rules() -> dict[str, DivisionRule]:
    """The number is that of the argument that names the dimension."""
    table = {
        "split": DivisionRule(partial(_cut, 2), _split_sizes),
        "unsafe_split": DivisionRule(partial(_cut, 2), _split_sizes),
        "split_with_sizes": DivisionRule(partial(_cut, 2), _split_sizes),
        "slice": DivisionRule(partial(_cut, 1), _slice_ends),
        "slice_backward": DivisionRule(partial(_joined, 2), _slice_backward_sizes),
        "cat": DivisionRule(partial(_joined, 1)),
        "select": DivisionRule(partial(_cut, 1)),
        "select_backward": DivisionRule(partial(_joined, 2), partial(output_shape, 1)),
        "unbind": DivisionRule(partial(_cut, 1)),
        "stack": DivisionRule(partial(_joined, 1)),
    }
    return {f"aten.{name}": rule for name, rule in table.items()}


def _cut(dim_at: int, operator: Operator, devices: int) -> Iterator[Strategy]:
    """Divides an operator of which the pieces come out."""
    whole = operator.inputs[0]
    pieces = [each for each in operator.outputs if each]
    if len(pieces) != len(operator.outputs):
        return
    dim = operator.integer(dim_at) % len(whole.shape)
    of_whole, of_piece = _letters(whole, pieces[0], dim)
    yield from divisions([of_whole], [TermSum(of_piece, [[0]])] * len(pieces), [0])
    parts = _equal_parts(operator, whole, pieces, dim)
    if parts:
        yield Strategy((Shard(dim, parts),), (Shard(dim),) * len(pieces))


def _joined(dim_at: int, operator: Operator, devices: int) -> Iterator[Strategy]:
    """Divides an operator into which the pieces go; what comes of each is a term of its own."""
    whole, pieces = operator.output, operator.inputs
    if any(len(each.shape) != len(pieces[0].shape) for each in pieces):
        return
    dim = operator.integer(dim_at) % len(whole.shape)
    of_whole, of_piece = _letters(whole, pieces[0], dim)
    yield Strategy((P,) * len(pieces), (P,))
    yield from divisions([of_piece] * len(pieces), [TermSum(of_whole, [range(len(pieces))])])
    parts = _equal_parts(operator, whole, pieces, dim)
    if parts:
        yield Strategy((Shard(dim),) * len(pieces), (Shard(dim, parts),))


def _letters(whole: TensorType, piece: TensorType, dim: int) -> tuple[str, str]:
    """Returns the letters of the whole and of a piece, which may not have the dimension."""
    letters = letters_of(whole.shape)
    of_whole = letters[:dim] + "." + letters[dim + 1 :]
    same = len(piece.shape) == len(whole.shape)
    return of_whole, of_whole if same else letters[:dim] + letters[dim + 1 :]


def _equal_parts(
    operator: Operator, whole: TensorType, pieces: Sequence[TensorType], dim: int
) -> int:
    """Counts the pieces that the whole has, if they are equal and have the dimension; else returns
    0.

    One alone must begin at a multiple of its size, and leave out nothing in between.
    """
    sizes = {each.shape[dim] if len(each.shape) == len(whole.shape) else 0 for each in pieces}
    size, total = max(sizes), whole.shape[dim]
    if len(sizes) > 1 or not size or total % size:
        return 0
    if "slice" in operator.family:
        first = 3 if operator.family.endswith("_backward") else 2
        begin, step = operator.argument(first, 0) or 0, operator.integer(first + 2, 1)
        return 0 if step != 1 or not isinstance(begin, int) or begin % size else total // size
    return total // size


def _split_sizes(whole: Operator, local: Operator) -> Arguments:
    """Returns the sizes of the pieces on the device."""
    dim = whole.integer(2) % len(whole.inputs[0].shape)
    sizes = [each.shape[dim] for each in local.outputs if each]
    return {1: tuple(sizes) if isinstance(whole.argument(1), tuple) else sizes[0]}


def _slice_ends(whole: Operator, local: Operator) -> Arguments:
    return _ends(whole, local.inputs[0], local.output, whole.inputs[0], 1)


def _slice_backward_sizes(whole: Operator, local: Operator) -> Arguments:
    ends = _ends(whole, local.output, local.inputs[0], whole.output, 2)
    return {1: local.output.shape, **ends}


def _ends(
    operator: Operator, whole: TensorType, piece: TensorType, before: TensorType, dim_at: int
) -> Arguments:
    """Returns the begin and end of a slice, where the device has as large a share of what is before
    it. If the dimension is not divided they stay as they are.
    """
    dim = operator.integer(dim_at) % len(whole.shape)
    if whole.shape == before.shape or whole.shape[dim] == before.shape[dim]:
        return {}
    begin = operator.integer(dim_at + 1) * whole.shape[dim] // before.shape[dim]
    return {dim_at + 1: begin, dim_at + 2: begin + piece.shape[dim]}
