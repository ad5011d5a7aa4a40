"""Which parameters Muon learns, and AdamW beside it.

Muon is for the weights of hidden layers (`capture.programs.parameter_roles`). What else no group of
the run config claims is learned by AdamW, as one more group, with the arguments `others`.
"""

from __future__ import annotations

import glob
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipedream.capture.programs.parameter_roles import Role, is_matrix
from pipedream.graph.errors import UserError
from pipedream.graph.run_config import MUON, GroupConfig, OptimizerConfig
from pipedream.runtime.optim.arguments import try_arguments
from pipedream.runtime.optim.optimizers import groups, matcher

OTHERS = "AdamW"
"""Learns what Muon is not for."""

MOMENTUM = "momentum_buffer"
"""What Muon remembers of a parameter, and AdamW does not."""

_MATCHING = "match_rms_adamw"
"""The value of `adjust_lr_fn` with which Muon's steps are as long as AdamW's at the same rate."""

_MOST_NAMED = 3


def with_others(config: OptimizerConfig, roles: Mapping[str, Role]) -> OptimizerConfig:
    """Returns the config with one more group, the last, of what Muon is not for, if there is any.

    `roles`: of all parameters of the model, by name, in its order. Without `others`, groups that
    leave nothing but matrices to Muon stay as they are: they divide the parameters by hand. Raises
    UserError where AdamW's arguments are missing or wrong.
    """
    if config.name != MUON:
        return config
    left = _unclaimed(config, roles)
    matching = config.args.get("adjust_lr_fn") == _MATCHING
    open_to_all = config.groups and config.others is None and not matching
    by_hand = open_to_all and all(roles[n].is_matrix for n in left)
    others = [] if by_hand else [name for name in left if roles[name] is not Role.HIDDEN]
    if not others:
        return config
    match = tuple(map(glob.escape, others))
    group = GroupConfig(match=match, name=OTHERS, args=_args_of_others(config, others[0]))
    return config.model_copy(update={"groups": (*config.groups, group)})


def _unclaimed(config: OptimizerConfig, names: Iterable[str]) -> list[str]:
    claimed = matcher([pattern for group in config.groups for pattern in group.match])
    return [name for name in names if not claimed(name)]


def _args_of_others(config: OptimizerConfig, example: str) -> dict[str, Any]:
    args = config.others
    if config.args.get("adjust_lr_fn") == _MATCHING:
        known = inspect.signature(torch.optim.Muon).parameters
        shared = {n: config.args.get(n, known[n].default) for n in ("lr", "weight_decay")}
        args = shared | (args or {})
    if args is None:
        raise UserError(
            f"optimizer {MUON}: is for the weights of hidden layers, and {OTHERS} learns the"
            f" others, such as {example}: write others: {{lr: 0.001}} beside args, or give args"
            f" adjust_lr_fn: {_MATCHING}, with which both have the same lr"
        )
    try_arguments("optimizer.others:", OTHERS, args)
    return args


def roles_by_shape(parameters: Mapping[str, Tensor]) -> dict[str, Role]:
    """Returns what is known before the model is captured: of its matrices the last is taken for the
    output, the others for weights of hidden layers. Enough to check arguments.
    """
    found = {
        name: Role.HIDDEN if is_matrix(each) else Role.NO_MATRIX
        for name, each in parameters.items()
    }
    matrices = [name for name, role in found.items() if role.is_matrix]
    return found | dict.fromkeys(matrices[-1:], Role.OUTPUT)


def roles_by_state(parameters: Mapping[str, Tensor], remembered: Iterable[str]) -> dict[str, Role]:
    """Returns roles that divide the parameters as the run did whose optimizers remember the tensors
    `PARAMETER/STATE`. What they do not remember has never been learned, and may be anyone's.
    """
    by_muon = {key.rpartition("/")[0] for key in remembered if key.endswith(f"/{MOMENTUM}")}
    others = {
        name: Role.OTHER_MATRIX if is_matrix(each) else Role.NO_MATRIX
        for name, each in parameters.items()
    }
    return others | {name: Role.HIDDEN for name in parameters if name in by_muon}


def who_learns(
    config: OptimizerConfig, roles: Mapping[str, Role], learned: Iterable[str]
) -> str | None:
    """Returns a line on what each optimizer learns of the parameters `learned`; None without Muon.

    `config`: as `with_others` returns it. Raises UserError if Muon would have nothing to learn.
    """
    if MUON not in config.names:
        return None
    wanted = frozenset(learned)
    names_of: dict[str, list[str]] = {MUON: []}
    for group in groups(config, roles):
        own = [name for name in roles if name in group.members & wanted]
        names_of.setdefault(group.optimizer.name, []).extend(own)
    matrices = names_of.pop(MUON)
    if not matrices:
        raise UserError(
            f"optimizer {MUON}: is for the weights of hidden layers, matrices before the last, and"
            f" the model has none that learns: write {OTHERS}"
        )
    texts = [f"{MUON} for {len(matrices)} matri{'x' if len(matrices) == 1 else 'ces'}"]
    for name, own in names_of.items():
        if own:
            others = f"other{'s' * (len(own) > 1)}"
            texts.append(f"{name} for {len(own)} {others}: {_described(own, roles)}")
    return ", ".join(texts)


def _described(names: Sequence[str], roles: Mapping[str, Role]) -> str:
    texts = []
    for role in Role:
        own = [name for name in names if roles[name] is role]
        if not own:
            continue
        if role is Role.NO_MATRIX:
            texts.append(
                "1 that is no matrix" if len(own) == 1 else f"{len(own)} that are no matrices"
            )
        elif len(own) <= _MOST_NAMED:
            texts.extend(f"{name} ({role.value})" for name in own)
        else:
            texts.append(f"{len(own)} such as {own[0]} ({role.value})")
    return ", ".join(texts)


def check_state(
    config: OptimizerConfig, names: Sequence[str], remembered: Iterable[str], where: str
) -> None:
    """Raises UserError if what is remembered, as `PARAMETER/STATE`, of a parameter of Muon's is not
    its own, or of one of AdamW's is Muon's. `names`: of the whole model.
    """
    if MUON not in config.names:
        return
    learner = {
        name: group.optimizer.name for group in groups(config, names) for name in group.members
    }
    for name, _, state in (key.rpartition("/") for key in remembered):
        is_muons = state == MOMENTUM
        if learner[name] == (OTHERS if is_muons else MUON):
            before = MUON if is_muons else "another optimizer"
            raise UserError(
                f"{where}: {name} was learned by {before}, and the config gives it to"
                f" {learner[name]}: write the optimizer and its groups as they were"
            )
