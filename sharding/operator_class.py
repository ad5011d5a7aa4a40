"""The class of an ATen operator, from the table of rules that it is in."""

from __future__ import annotations

import math

from pipedream.graph.placements.operator_class import OperatorClass
from pipedream.graph.placements.operators import Operator
from pipedream.sharding.rules import normalizations, pieces, pointwise, reductions, views

_TABLES = {
    OperatorClass.ONE_TO_ONE: (pointwise, views, pieces),
    OperatorClass.ONE_TO_MANY: (reductions, normalizations),
}
_BY_FAMILY = {
    family: own for own, tables in _TABLES.items() for table in tables for family in table.rules()
}
"""Without products, convolutions, lookups and what else has sums or places of its own."""


def class_of(operator: Operator) -> OperatorClass:
    """That of the operator; broadcasts are one-to-many, as an element goes to many places."""
    known = _BY_FAMILY.get(operator.family, OperatorClass.COMPLICATED)
    if known is not OperatorClass.ONE_TO_ONE:
        return known
    if not operator.inputs:
        return OperatorClass.INDEPENDENT
    given = max((math.prod(each.shape) for each in operator.outputs if each), default=0)
    read = max(math.prod(each.shape) for each in operator.inputs)
    return OperatorClass.ONE_TO_MANY if 0 < read < given else known
