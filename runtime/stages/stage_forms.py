"""One stage in the forms that its minibatches need, of which each has shapes of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipedream.runtime.stages.by_kind import CapturedStages, Peeking
from pipedream.runtime.stages.stage_module import StageModule


@dataclass(frozen=True)
class StageForms:
    """`usual`: the form for all minibatches but the `others`, by number. With `captured` it depends
    on what the data of a segment are like.
    """

    usual: StageModule
    others: Mapping[int, StageModule] = field(default_factory=dict)
    captured: CapturedStages | None = None

    @staticmethod
    def of_each(forms: Sequence[StageModule]) -> StageForms:
        """The form of each minibatch, in their order."""
        return StageForms(forms[0], dict(enumerate(forms)))

    @property
    def known(self) -> list[StageModule]:
        """Those that are there before there are data."""
        return [self.usual, *self.others.values()]

    def begin(self, data: Peeking) -> None:
        """Called with the minibatches of a segment, before it begins."""
        if self.captured is not None:
            self.captured.begin(data)

    def of(self, minibatch: int) -> StageModule:
        if self.captured is not None:
            return self.captured.of_minibatch(minibatch)[self.usual.interface.stage]
        return self.others.get(minibatch, self.usual)
