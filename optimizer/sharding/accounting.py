"""What counts in the search for a sharding of a whole model, before its stages are known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from pipedream.graph.placements.operators import OperatorProfile
from pipedream.graph.placements.placement import Mesh, device_count
from pipedream.graph.profile import Footprint
from pipedream.optimizer.cost.memory import STATES
from pipedream.optimizer.intra.costs import Accounting
from pipedream.optimizer.search.request import Request
from pipedream.schedule.policy import uniform_updates


def accounting(request: Request, mesh: Mesh) -> Accounting:
    """As if the model were divided evenly among a pipeline of teams: their devices have so much
    memory together, and of what passes keep, half of them on average have a minibatch in flight.
    """
    settings, cluster = request.settings, request.cluster
    minibatches = settings.microbatches if uniform_updates(settings.schedule) else 1
    teams = cluster.devices // device_count(mesh)
    types = request.device_types
    return Accounting(
        minibatches=minibatches,
        parameter_seconds=1 / request.step_rate / minibatches / cluster.device(0).speed,
        parameter_copies=2 + STATES[settings.optimizer],
        activation_copies=(teams + 1) / 2,
        limit=teams * types.smallest_memory if types.memory_limited else None,
    )


def kept_bytes(profile: OperatorProfile, footprints: Mapping[str, Footprint]) -> dict[str, float]:
    """By call of the forward pass the bytes that its node was measured to keep, for each byte of
    the values that its calls give and the backward pass reads.
    """
    graph, backward = profile.graph, profile.graph.backward_calls()
    types = graph.types()
    read = {v for call in graph.calls if call.name in backward for v in call.reads}
    given: Counter[str] = Counter()
    for call in graph.calls:
        if call.name not in backward:
            values = (v for v in call.results if v is not None and v in read)
            given[profile.nodes[call.name]] += sum(types[v].bytes for v in values)
    return {
        call.name: footprints[node].in_programs.saved / given[node]
        for call in graph.calls
        if call.name not in backward
        for node in [profile.nodes[call.name]]
        if node in footprints and given[node]
    }
