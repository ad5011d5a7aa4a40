"""The orders of the literature, and which pipelines each is for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from pipedream.schedule.orders.interleaved import interleaved
from pipedream.schedule.orders.passes import Round
from pipedream.schedule.orders.v_shaped import v_half, v_min, zb_v
from pipedream.schedule.orders.zero_bubble import zb_h1, zb_h2
from pipedream.schedule.spec import PipelineSpec

RankMap: TypeAlias = Callable[[int, int], tuple[int, ...]]
"""The place of each stage, where so many ranks have so many stages each."""


def loop(ranks: int, stages_each: int) -> tuple[int, ...]:
    """Returns the place of each stage: 0 1 2 0 1 2 (Narayanan et al., "Efficient Large-Scale
    Language Model Training on GPU Clusters Using Megatron-LM", SC 2021, section 2.2).
    """
    return tuple(stage % ranks for stage in range(ranks * stages_each))


def vee(ranks: int, stages_each: int) -> tuple[int, ...]:
    """Returns the place of each stage: 0 1 2 2 1 0, and on to 0 1 2 if there are more (Qi et al.,
    "Pipeline Parallelism with Controllable Memory", 2024, section 3).

    The stages on both sides of a turn are on the same rank and send each other nothing.
    """
    there = range(ranks)
    turns = (there if turn % 2 == 0 else reversed(there) for turn in range(stages_each))
    return tuple(place for turn in turns for place in turn)


@dataclass(frozen=True)
class RoundOrder:
    """`make(spec, microbatches)` gives the passes of a round. `maps`: how a rank comes by its
    stages, if it has several; `stages_each`: how many it may have.
    """

    make: Callable[[PipelineSpec, int], Round]
    stages_each: tuple[int, ...]
    maps: tuple[RankMap, ...] = ()

    def misfit(self, spec: PipelineSpec) -> str | None:
        """Returns why it is not for this pipeline, in words that follow its name."""
        counts = {len(stages) for stages in spec.places}
        if spec.name != "flush":
            return f"is for schedule flush; this one is {spec.name}"
        if len(set(spec.replicas)) > 1:
            return "is for stages that have as many replicas each"
        if counts - set(self.stages_each):
            return f"is for {_either(self.stages_each)} on each rank"
        (stages_each,) = counts if len(counts) == 1 else (0,)
        fitting = [rank_map(len(spec.places), stages_each) for rank_map in self.maps or (loop,)]
        if not stages_each or spec.place_of not in fitting:
            maps = " or ".join(rank_map.__name__ for rank_map in self.maps or (loop,))
            return f"is for stages that are on the ranks as `{maps}` says"
        return None


LITERATURE: Mapping[str, RoundOrder] = {
    "interleaved": RoundOrder(interleaved, (1, 2, 3, 4), (loop,)),
    "zb-h1": RoundOrder(zb_h1, (1,)),
    "zb-h2": RoundOrder(zb_h2, (1,)),
    "zb-v": RoundOrder(zb_v, (2,), (vee,)),
    "v-half": RoundOrder(v_half, (2,), (vee,)),
    "v-min": RoundOrder(v_min, (2,), (vee,)),
}


def literature(spec: PipelineSpec, microbatches: int) -> dict[str, Round]:
    """Returns a round in each of them that is for the pipeline, by name."""
    return {
        name: each.make(spec, microbatches)
        for name, each in LITERATURE.items()
        if each.misfit(spec) is None
    }


def _either(counts: tuple[int, ...]) -> str:
    *others, last = map(str, counts)
    stages = "stage" if counts == (1,) else "stages"
    return f"{', '.join(others)} or {last} {stages}" if others else f"{last} {stages}"
