"""The actions of a worker of a pipeline, and how they are written as text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple, TypeAlias

Worker: TypeAlias = tuple[int, int]
"""(stage, replica)."""

StageLink: TypeAlias = tuple[int, int]
"""(source stage, target stage): the activation goes forward, its gradient comes back."""


class Kind(StrEnum):
    """A backward pass is one action, or two: the gradients of what the stage received, which
    earlier stages wait for, then those of its parameters, which nobody waits for (Qi, Wan, Huang,
    Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024, where the halves are called B and W).
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "BI"
    BACKWARD_WEIGHT = "BW"
    SEND_ACTIVATION = "SA"
    RECV_ACTIVATION = "RA"
    SEND_GRADIENT = "SG"
    RECV_GRADIENT = "RG"
    ALL_REDUCE = "AR"
    NORM = "N"
    UPDATE = "U"

    # An enum's own is Python code, and kinds are looked up for every action.
    __hash__ = str.__hash__


RECEIVES = frozenset({Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT})
SENDS = frozenset({Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT})

BACKWARDS = frozenset({Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})

PASSES = BACKWARDS | {Kind.FORWARD}

EXCHANGES = SENDS | {Kind.ALL_REDUCE, Kind.NORM}
"""What takes a rank's time for others, besides waiting for their messages."""

CLOSING = frozenset({Kind.ALL_REDUCE, Kind.NORM, Kind.UPDATE})
"""What comes once in a round of a worker, after its passes."""

ENDS_BACKWARD = frozenset({Kind.BACKWARD, Kind.BACKWARD_WEIGHT})
"""After it the minibatch is no longer in flight and no longer needs its version of the weights. The
last one of a round ends the round."""


_TEXT = re.compile(
    r"(?P<stage>\d+)(\.(?P<replica>\d+))?(?P<kind>[A-Z]+)(?P<minibatch>\d+)"
    r"(/(?P<divisor>\d+))?(@(?P<version>\d+))?([<>](?P<peer>\d+)(\.(?P<peer_replica>\d+))?)?"
)


class Action(NamedTuple):
    """One thing one worker does.

    `version` is the version of the worker's own weights: the one used by a forward or backward pass
    (and by the messages that belong to it), the one made by an all-reduce, a norm and their update.
    These stand for the round that begins with `minibatch`; the gradients of its `divisor`
    minibatches are added up over the replicas (each adds those of the minibatches that ran on it:
    some, one or none) and divided by `divisor`. At a norm the worker hands in the gradients of its
    round, from which all ranks find the norm of the whole model's gradient.

    Prints as `2F0` (stage 2, forward, minibatch 0); in full `0.1SA5@3>1.2` (replica 1 of stage 0
    sends the activation of minibatch 5, computed on version 3, to replica 2 of stage 1) and
    `0.1AR4/3@2` (all-reduce of minibatches 4 to 6, for version 2). What is 0, and a divisor of 1,
    is left out.
    """

    kind: Kind
    stage: int
    replica: int
    minibatch: int
    version: int
    peer: Worker | None = None
    divisor: int = 1

    @property
    def worker(self) -> str:
        """Writes `2` for replica 0 of stage 2, `2.1` for replica 1."""
        return show_worker((self.stage, self.replica))

    def __str__(self) -> str:
        divisor = "" if self.divisor == 1 else f"/{self.divisor}"
        version = f"@{self.version}" if self.version else ""
        peer = ""
        if self.peer is not None:
            peer = (">" if self.kind in SENDS else "<") + show_worker(self.peer)
        return f"{self.worker}{self.kind}{self.minibatch}{divisor}{version}{peer}"


def parse_action(text: str) -> Action:
    """Returns the action that prints as `text`. Raises ValueError."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not an action: expected something like 2F0 or 0.1SA5@3>1.2")
    number = {name: int(value or 0) for name, value in match.groupdict().items() if name != "kind"}
    return Action(
        kind=Kind(match["kind"]),
        stage=number["stage"],
        replica=number["replica"],
        minibatch=number["minibatch"],
        version=number["version"],
        peer=(number["peer"], number["peer_replica"]) if match["peer"] else None,
        divisor=number["divisor"] if match["divisor"] else 1,
    )


def show_worker(worker: Worker) -> str:
    """Writes `2` for replica 0 of stage 2, `2.1` for replica 1."""
    stage, replica = worker
    return f"{stage}.{replica}" if replica else f"{stage}"


def stages_and_replicas(workers: Iterable[Worker]) -> tuple[str, str]:
    """Returns two cells of a table for a rank with these workers, such as `0,2` and `0,0`."""
    stages, replicas = (",".join(map(str, numbers)) for numbers in zip(*workers, strict=True))
    return stages, replicas


def uses(actions: Iterable[Action]) -> Counter[int]:
    """Returns how many minibatches run on each version of a worker's weights, given its actions."""
    return Counter(action.version for action in actions if action.kind is Kind.FORWARD)


class Versions:
    """The versions of a worker's weights that exist as it goes through its actions: the newest, and
    those on which a backward pass is still to be run, in flight or to come.
    """

    def __init__(self, actions: Iterable[Action]) -> None:
        self.left = uses(actions)
        self.newest = 0
        self.alive = {0}

    def gone_backward(self, version: int) -> None:
        """Notes that the backward pass of a minibatch on `version` is done."""
        self.left[version] -= 1
        if not self.left[version] and version != self.newest:
            self.alive.remove(version)

    def updated(self) -> None:
        """Notes that there is a new version."""
        if not self.left[self.newest]:
            self.alive.remove(self.newest)
        self.newest += 1
        self.alive.add(self.newest)
