"""The parameter groups of a run config. Pure.

A stage has part of the model, and so some members of each group, or none. The groups are those of
the whole model on every stage, in one order, so that the second group is the same one everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from pipedream.graph.errors import UserError
from pipedream.graph.run_config import GroupConfig, OptimizerConfig


@dataclass(frozen=True)
class ParameterGroup:
    """The parameters `members` of the whole model, with their optimizer, one without groups.

    `option`: where the run config defines it.
    """

    option: str
    optimizer: OptimizerConfig
    members: frozenset[str]


def groups(config: OptimizerConfig, names: Iterable[str]) -> list[ParameterGroup]:
    """Returns the groups of the config, then one of the parameters that match none of them, if any.

    `names`: all parameters of the model. Raises UserError if a pattern matches nothing, or a group
    gets nothing.
    """
    known = list(names)
    left, found = known, []
    for number, given in enumerate(config.groups):
        option = f"optimizer.groups.{number}"
        for pattern in given.match:
            if not any(fnmatchcase(name, pattern) for name in known):
                raise UserError(
                    f"{option}: {pattern!r} matches no parameter of the model, such as "
                    f"{', '.join(known[:3])}: a * stands for any letters"
                )
        mine = [name for name in left if any(fnmatchcase(name, each) for each in given.match)]
        if not mine:
            raise UserError(
                f"{option}: the groups before it have all that it matches: move it before them"
            )
        found.append(ParameterGroup(option, _optimizer(config, given), frozenset(mine)))
        left = [name for name in left if name not in found[-1].members]
    if left or not found:
        rest = OptimizerConfig(name=config.name, args=config.args)
        found.append(ParameterGroup("optimizer", rest, frozenset(left)))
    return found


def _optimizer(config: OptimizerConfig, given: GroupConfig) -> OptimizerConfig:
    if given.name is not None:
        return OptimizerConfig(name=given.name, args=given.args)
    return OptimizerConfig(name=config.name, args=config.args | given.args)
