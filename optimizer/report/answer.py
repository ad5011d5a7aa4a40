"""What a plan comes to in the words of those who rent machines: tokens, days, share of the peak,
degrees of parallelism, memory of a device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pipedream.graph.plan import Plan, Stage
from pipedream.graph.profile import Profile
from pipedream.graph.units import show_amount, show_bytes, show_seconds
from pipedream.optimizer.report.tables import show_mesh, show_replicas

_TRILLION = 1e12
_DAY = 86_400
_LASTING = ("parameters", "weight_versions", "optimizer_state", "gradients")
"""What a stage holds whatever is in flight."""


def answer_rows(
    plan: Plan, profile: Profile, seconds: float, rank_bytes: float | None = None
) -> Iterator[tuple[str, str, str]]:
    """Yields rows of name, figure and remark; `seconds` of a minibatch of the profile, in a run;
    `rank_bytes`: what a rank holds at once, if it has several stages.
    """
    if seconds <= 0:
        return
    count = plan.predicted.microbatches or 1
    if count > 1:
        whole = count * profile.batch_size
        tokens = "" if profile.tokens is None else f" of {profile.tokens:,} tokens"
        remark = f"of {show_amount(whole)} examples{tokens}"
        yield "an update", show_seconds(count * seconds), remark
    days = show_days(profile, seconds)
    remarks = [_share_of_peak(plan, profile, seconds), days and f"a trillion tokens in {days}"]
    yield "speed", show_speed(profile, seconds), "; ".join(filter(None, remarks))
    yield "layout", _degrees(plan), "devices: " + _factors(plan)
    yield from _memory(plan, rank_bytes)


def show_speed(profile: Profile, seconds: float) -> str:
    """Tokens per second, or examples where these are no tokens."""
    examples = profile.batch_size / seconds
    if profile.tokens is None:
        return f"{show_amount(examples)} examples/s"
    return f"{show_amount(examples * profile.tokens)} tokens/s"


def show_days(profile: Profile, seconds: float) -> str:
    """What a trillion tokens take; empty where examples are no tokens."""
    if profile.tokens is None:
        return ""
    return f"{_TRILLION / (profile.batch_size / seconds * profile.tokens) / _DAY:.3g} days"


def _share_of_peak(plan: Plan, profile: Profile, seconds: float) -> str:
    """Of all devices of the cluster, those that the plan leaves idle among them: what is paid for.
    Passes that are recomputed do not count as work done.
    """
    if profile.estimated is None or profile.flops is None:
        return ""
    devices = plan.cluster.devices
    share = profile.flops / (seconds * devices * profile.estimated.peak)
    return f"{share:.0%} of the peak of {devices} devices"


def _degrees(plan: Plan) -> str:
    return f"{plan.workers} of {plan.cluster.devices}"


def _factors(plan: Plan) -> str:
    """`data 4 x pipeline 2 x tensor 8`; by stage where stages differ."""
    places = len(set(plan.rank_map))
    depth = f"pipeline {places}"
    if len(plan.stages) > places:
        depth += f" of {len(plan.stages)} stages"
    data = {stage.replicas for stage in plan.stages}
    tensor = {stage.mesh for stage in plan.stages}
    own = [stage.mesh for stage in plan.stages]
    meshes = show_mesh(own[0]) if len(tensor) == 1 else ", ".join(map(show_mesh, own))
    if meshes == "-":
        meshes = "1"
    if len(data) == 1 and len(tensor) == 1:
        return f"data {min(data)} x {depth} x tensor {meshes}"
    return f"{depth}; by stage data {show_replicas(plan.replicas)}; tensor {meshes}"


def _memory(plan: Plan, rank_bytes: float | None) -> Iterator[tuple[str, str, str]]:
    """Yields what the fullest device holds, by kind, the largest first."""
    places: dict[int, list[Stage]] = {}
    for stage, place in zip(plan.stages, plan.rank_map, strict=True):
        places.setdefault(place, []).append(stage)
    fullest = max(places.values(), key=lambda own: sum(stage.memory_bytes for stage in own))
    kinds: Counter[str] = Counter()
    for stage in fullest:
        if stage.memory is None:
            return
        kinds.update(stage.memory.model_dump())
    whole = float(sum(kinds.values()))
    if len(fullest) > 1 and rank_bytes is not None:  # its stages are not at their peaks at once
        lasting = {name: kinds[name] for name in _LASTING}
        kinds = Counter(lasting | {"activations and others": rank_bytes - sum(lasting.values())})
        whole = rank_bytes
    parts = sorted(((size, name) for name, size in kinds.items() if size > 0), reverse=True)
    words = ", ".join(f"{name.replace('_', ' ')} {show_bytes(size)}" for size, name in parts)
    stages = ", ".join(str(stage.stage) for stage in fullest)
    where = f" (stage {stages})" if len(plan.stages) > 1 else ""
    yield "memory of a device", show_bytes(whole), f"{words}{where}"
