"""What a plan comes to in the words of those who rent machines: tokens, days, share of the peak."""

from __future__ import annotations

from collections.abc import Iterator

from pipedream.graph.plan import Plan
from pipedream.graph.profile import Profile
from pipedream.graph.units import show_amount, show_seconds

_TRILLION = 1e12
_DAY = 86_400


def answer_rows(plan: Plan, profile: Profile, seconds: float) -> Iterator[tuple[str, str, str]]:
    """Yields rows of name, figure and remark; `seconds` of a minibatch of the profile, in a run."""
    if seconds <= 0:
        return
    examples = profile.batch_size / seconds
    count = plan.predicted.microbatches or 1
    if count > 1:
        whole = count * profile.batch_size
        yield "an update", show_seconds(count * seconds), f"of {show_amount(whole)} examples"
    tokens = profile.tokens
    if tokens is None:
        yield "speed", f"{show_amount(examples)} examples/s", _share_of_peak(plan, profile, seconds)
        return
    rate = examples * tokens
    days = f"a trillion tokens in {_TRILLION / rate / _DAY:.3g} days"
    shares = [each for each in (_share_of_peak(plan, profile, seconds), days) if each]
    yield "speed", f"{show_amount(rate)} tokens/s", "; ".join(shares)


def _share_of_peak(plan: Plan, profile: Profile, seconds: float) -> str:
    """Of all devices of the cluster, those that the plan leaves idle among them: what is paid for.
    Passes that are recomputed do not count as work done.
    """
    if profile.estimated is None or profile.flops is None:
        return ""
    devices = plan.cluster.devices
    share = profile.flops / (seconds * devices * profile.estimated.peak)
    return f"{share:.0%} of the peak of {devices} devices"
