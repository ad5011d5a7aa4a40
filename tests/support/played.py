"""A schedule as it was played, as events."""

from __future__ import annotations

from schedules import schedule

from pipedream.graph.timeline import Event


def played(replicas, minibatches, unit=0.01):
    """The events of a run in which every action takes the time of its place in the play."""
    made = schedule("weight-stashing", replicas, [(0, 1)], minibatches)
    ranks = {}
    for rank, worker in enumerate(made.workers):
        takes = unit * replicas[worker[0]]
        times = {(step.kind, step.minibatch): step.time * unit for step in made.steps[worker]}
        now, events = 0.0, []
        for action in made.actions(worker):
            begin = times.get((action.kind, action.minibatch), now)
            now = begin + (takes if (action.kind, action.minibatch) in times else 0)
            events.append(Event(action, begin, now))
        ranks[rank] = events
    return ranks
