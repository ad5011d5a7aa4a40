"""Proves every schedule sound for all plans of up to six stages with up to four replicas each.

    python scripts/bench/schedules.py [--stages 6] [--replicas 4] [--processes 2]

tests/schedule does the same for plans of six stages with one of the five schedules each. Prints how
many schedules and actions were proved; ends with the checker's error if one is not sound.
"""

from __future__ import annotations

import itertools
from multiprocessing import Pool

import click
from tqdm import tqdm

from pipedream.graph.choices import SCHEDULES
from pipedream.schedule.checker import check
from pipedream.schedule.in_flight import warm_up
from pipedream.schedule.policy import policy
from pipedream.schedule.schedule import Schedule
from pipedream.schedule.spec import PipelineSpec


def prove(replicas: tuple[int, ...]) -> tuple[int, int]:
    """Returns the numbers of schedules and actions. Long enough to fill the pipeline, and the last
    round is not a whole one.
    """
    links = tuple((stage, stage + 1) for stage in range(len(replicas) - 1))
    actions = 0
    for name in SCHEDULES:
        spec = PipelineSpec(name, replicas, links)
        microbatches = max(4, policy(spec).least_microbatches)
        minibatches = warm_up(replicas, 0) * replicas[0] + max(replicas) + microbatches - 3
        schedule = Schedule(PipelineSpec(name, replicas, links, microbatches), minibatches)
        check(schedule)
        actions += sum(len(schedule.actions(worker)) for worker in schedule.workers)
    return len(SCHEDULES), actions


@click.command(help=__doc__)
@click.option("--stages", default=6, show_default=True)
@click.option("--replicas", default=4, show_default=True)
@click.option("--processes", default=2, show_default=True)
def main(stages: int, replicas: int, processes: int) -> None:
    plans = [
        plan
        for count in range(1, stages + 1)
        for plan in itertools.product(range(1, replicas + 1), repeat=count)
    ]
    with Pool(processes) as pool:
        proved = list(tqdm(pool.imap_unordered(prove, plans, chunksize=16), total=len(plans)))
    schedules, actions = (sum(column) for column in zip(*proved, strict=True))
    print(f"{schedules:,} schedules of {len(plans):,} plans, {actions:,} actions: all sound")


if __name__ == "__main__":
    main()
