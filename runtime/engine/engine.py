"""The loop of one rank: performs its list of actions, in that order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from pipedream.comm.buckets import take_turns
from pipedream.comm.messages import PeerLost
from pipedream.comm.transport import Transport
from pipedream.runtime.engine.action_times import ActionTimes
from pipedream.runtime.engine.forward import ForwardExecutor, Minibatches
from pipedream.runtime.run.action_stream import ActionStream
from pipedream.runtime.stages.partition import StageInterface
from pipedream.runtime.supervise.device_progress import DeviceProgress
from pipedream.schedule.action import PASSES, RECEIVES, Action, Kind
from pipedream.schedule.operations import sum_order
from pipedream.schedule.overlap import FIRST_LOOK_AHEAD, LOOK_AHEAD


@dataclass
class Engine:
    """All stages of one rank: `executors[stage]` does the actions of its replica of that stage.

    `before` and `after` are called with every action, `times` says when each was done. Sends and
    receives of all stages go through the one `transport`, in the order of the list. `progress`: of
    the GPU, if there is one. `seen`: the kinds of passes that were done, by stage; those `to_come`
    are done with few receives posted.
    """

    executors: Mapping[int, ForwardExecutor]
    transport: Transport
    after: Callable[[Action], None] = lambda action: None
    before: Callable[[Action], None] = lambda action: None
    times: ActionTimes = field(default_factory=ActionTimes)
    progress: DeviceProgress | None = None
    seen: set[tuple[int, Kind]] = field(default_factory=set)
    to_come: set[tuple[int, Kind]] = field(default_factory=set)

    def run(self, stream: ActionStream, data: Minibatches) -> None:
        """Performs one segment. Raises PeerLost, naming the action that could not be done."""
        for executor in self.executors.values():
            executor.begin(data)
        order = sum_order(stream.actions)
        take_turns([sums for stage in order for sums in self.executors[stage].buckets])
        self.times.begin()
        self._perform(stream)
        self.transport.drain()
        self.times.end()
        for executor in self.executors.values():
            executor.end()

    def _perform(self, stream: ActionStream) -> None:
        perform = {stage: executor.table for stage, executor in self.executors.items()}
        actions: Sequence[Action] = ()
        position = posted = 0
        self._look_out(stream.actions)
        while (committed := stream.commit(position, self._look_ahead())) > position:
            if stream.actions is not actions:
                actions = stream.actions  # the first of them may be done already
                for stage, executor in self.executors.items():
                    own = [action for action in actions if action.stage == stage]
                    executor.follow(own, stream.lateness)
            for action in actions[posted:committed]:
                if action.kind in RECEIVES:
                    self.executors[action.stage].post(action)
            action, position, posted = actions[position], position + 1, committed
            begin = self.times.mark()
            self.before(action)
            if self.progress is not None:
                self.progress.begin(action)
            try:
                perform[action.stage][action.kind](action)
            except PeerLost as error:
                where = f"at {action}, minibatch {action.minibatch}"
                raise PeerLost(f"{error} ({where})", error.peer) from error
            if self.progress is not None:
                self.progress.given()
            self.times.add(action, begin)
            if self.to_come:
                self.seen.add((action.stage, action.kind))
                self.to_come.discard((action.stage, action.kind))
            self.after(action)

    def _look_out(self, actions: Sequence[Action]) -> None:
        """Notes which kinds of passes are yet to be done a first time."""
        if self.transport.is_queued:
            passes = {(action.stage, action.kind) for action in actions if action.kind in PASSES}
            self.to_come = passes - self.seen

    def _look_ahead(self) -> int:
        return FIRST_LOOK_AHEAD if self.to_come else LOOK_AHEAD


def minibatches_read(
    actions: Iterable[Action],
    interfaces: Sequence[StageInterface],
    stages: int,
    varying: bool = False,
) -> list[int]:
    """Returns the minibatches that a rank reads in its forward passes, in that order.

    `interfaces` are those of its stages, of so many: those that read an input of the model, and the
    last one for the target; all if minibatches are `varying`, to know their shapes. Reading the
    same minibatch twice in a row counts once.
    """
    reading = {
        each.stage for each in interfaces if each.reads or each.stage == stages - 1 or varying
    }
    passes = (
        action.minibatch
        for action in actions
        if action.kind is Kind.FORWARD and action.stage in reading
    )
    return [minibatch for minibatch, _ in groupby(passes)]
