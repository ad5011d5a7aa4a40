"""Which place of the pipeline has which stages, where a rank has several."""

from __future__ import annotations


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
