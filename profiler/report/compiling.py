"""Says what compiling a model gains: as a whole, and group by group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from pipedream.graph.placements.operator_class import class_of_layer
from pipedream.graph.profile import CompiledWay, Profile, ProfiledGroups
from pipedream.graph.run_config import BY_GROUPS
from pipedream.graph.units import show_bytes, show_seconds

_MOST_ROWS = 10


def compiling_lines(profile: Profile) -> Iterator[str]:
    """Yields lines of text, none if nothing was to be compiled."""
    if profile.compile_compared:
        ways = (f"{show_seconds(way.seconds)} {_way(way)}" for way in profile.compile_compared)
        yield f"Passes of the whole model take {', '.join(ways)}."
    if profile.compiled_groups:
        yield _groups(profile.compiled_groups)
    if profile.not_compiled is not None:
        yield f"Not compiled: {profile.not_compiled}."
    if profile.compile is not None:
        by = profile.compile
        yield f"Times and saved bytes are of parts compiled by {by}, as stages will be."


def _way(way: CompiledWay) -> str:
    if way.compile is None:
        return "not compiled"
    took = f"compiled in {show_seconds(way.compile_seconds)}"
    if not way.compile.startswith(BY_GROUPS):
        return f"{took} as a whole"
    return f"{took} as {way.groups} groups, {way.forms} of them different"


def _groups(groups: Sequence[ProfiledGroups]) -> str:
    """Says what is compiled, of all groups that were tried."""
    own = [each for each in groups if each.compiled]
    if not own:
        return "No group of layers is faster compiled."
    eager = sum(each.groups * each.eager_seconds for each in own)
    made = sum(each.groups * (each.compiled_seconds or 0.0) for each in own)
    count, total = (sum(each.groups for each in some) for some in (own, groups))
    return (
        f"Of {total} groups of layers {count} are faster compiled, each by itself:"
        f" {show_seconds(made)} instead of {show_seconds(eager)}."
    )


def groups_columns(
    profile: Profile,
) -> tuple[Mapping[str, Sequence[str]], Mapping[str, Sequence[str]]]:
    """Returns columns of text and of numbers by heading, a row for each kind of groups: those first
    that take longest.
    """
    longest = sorted(profile.compiled_groups, key=lambda each: -each.groups * each.eager_seconds)
    shown = longest[:_MOST_ROWS]
    labels = {
        "number": [str(each.groups) for each in shown],
        "kept": ["compiled" if each.compiled else "as it is" for each in shown],
        "class": [_class(profile, each) for each in shown],
        "module": [each.module or "the model" for each in shown],
    }
    numbers = {
        "layers": [str(len(each.nodes) // each.groups) for each in shown],
        "as it is": [show_seconds(each.eager_seconds) for each in shown],
        "compiled": [_shown(each.compiled_seconds, show_seconds) for each in shown],
        "saved": [show_bytes(each.eager_saved_bytes) for each in shown],
        "saved compiled": [_shown(each.compiled_saved_bytes, show_bytes) for each in shown],
        "compile": [_shown(each.compile_seconds, show_seconds) for each in shown],
    }
    return labels, numbers


def _class(profile: Profile, groups: ProfiledGroups) -> str:
    """Returns that of the layer that needs most of its inputs."""
    layers = (profile.node[name].description for name in groups.nodes)
    return max(map(class_of_layer, layers)).words


def _shown(amount: float | None, show: Callable[[float], str]) -> str:
    return "fails" if amount is None else show(amount)
