"""The options of planning, of `pd-optimize` as of `pipedream.optimize`: names, types, defaults."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from types import NoneType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeAlias,
    get_args,
    get_origin,
    get_type_hints,
)

from pipedream.graph.choices import (
    BEST_ORDER,
    CORRECTIONS,
    ORDER_NAMES,
    Correction,
    Grouping,
    InFlight,
    IntraOp,
    OptimizerName,
    Recompute,
    ScheduleName,
    Zero,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipedream.graph.model import Graph
    from pipedream.graph.placements.operators import OperatorProfile
    from pipedream.graph.profile import Profile


@dataclass(frozen=True)
class Bounds:
    """Finite numbers from `least` on, which itself is left out if `above`, up to `most`."""

    least: float
    most: float | None = None
    above: bool = False


Count: TypeAlias = Annotated[int, Bounds(1)]
Factor: TypeAlias = Annotated[float, Bounds(0, above=True)]


@dataclass(frozen=True)
class ModelInMemory:
    """A model that has no files: its graph, and what else was profiled of it."""

    graph: Graph
    profile: Profile | None = None
    operators: OperatorProfile | None = None


@dataclass(frozen=True)
class Options:
    """What is asked for, None where nothing is: one field per option, under its Python name.

    Amounts and lists are as typed: `plan.json` records them so. `typed`: the options that the user
    gave, and not an earlier plan.
    """

    graph: Path | ModelInMemory

    cluster: Path | None = None
    machines: str | None = None
    bandwidth: str | None = None
    latency: str | None = None
    speed: Factor | None = None
    like: Path | None = None
    workers: Count | None = None

    profile: Path | None = None
    again: tuple[Path, ...] = ()
    cost_model: Literal["network", "paper", "released", "measured"] | None = None
    activation_compression: Factor | None = None
    update_rate: str | None = None
    calibrate: tuple[Path, ...] = ()

    objective: Literal["throughput", "latency"] = "throughput"
    straight: bool = False
    group: Grouping = "none"
    fewer_machines: bool = False
    epsilon: Annotated[float, Bounds(0)] | None = None
    layers: Count | None = None
    split: str | None = None
    replicas: str | None = None

    schedule: ScheduleName | None = None
    order: Annotated[str, (*ORDER_NAMES, BEST_ORDER)] | None = None
    stages_per_rank: Annotated[int, Bounds(1, 4)] | None = None
    microbatches: Count | None = None
    global_batch: Count | None = None
    sequence: Count | None = None
    memory: str | None = None
    room: str | None = None
    optimizer: OptimizerName = "adam"
    weight_prediction: bool = False
    error_feedback: bool = False
    basis_rotation: bool = False
    recompute: Recompute = "auto"
    zero: Zero = "auto"
    host_bandwidth: str | None = None
    in_flight: InFlight = "useful"

    mesh: str | None = None
    shard: tuple[str, ...] = ()
    intra_op: IntraOp = "auto"

    output: Path | None = None
    """The folder that the files are for; None if they are for none."""
    export: tuple[Literal["torch", "torchtitan", "deepspeed", "megatron"], ...] = ()
    timeline: bool = False
    compare: bool = False
    sweep: str | None = None

    typed: frozenset[str] = frozenset()

    @property
    def corrections(self) -> frozenset[Correction]:
        """Those whose memory is counted."""
        return frozenset(name for name in CORRECTIONS if getattr(self, name))

    @property
    def graph_path(self) -> Path:
        """The path of graph.txt, or what stands for it in messages."""
        return self.graph if isinstance(self.graph, Path) else Path("graph.txt")

    @property
    def profile_path(self) -> Path:
        """The profile that the graph came with."""
        return self.profile or self.graph_path.with_name("profile.json")


@dataclass(frozen=True)
class OptionType:
    """The type of an option, the words that it may be, whether it has `several` in a tuple, and its
    default.
    """

    of: type
    choice: tuple[str, ...] | None
    bounds: Bounds | None
    several: bool
    default: Any


@cache
def option_types() -> Mapping[str, OptionType]:
    """The type of each option, by its Python name."""
    hints = get_type_hints(Options, include_extras=True)
    others = ("graph", "typed")
    return {
        each.name: _option_type(hints[each.name], each.default)
        for each in fields(Options)
        if each.name not in others
    }


def _option_type(hint: Any, default: Any) -> OptionType:
    several = get_origin(hint) is tuple
    if several or NoneType in get_args(hint):
        hint = get_args(hint)[0]
    if get_origin(hint) is Literal:
        return OptionType(str, get_args(hint), None, several, default)
    if get_origin(hint) is not Annotated:
        return OptionType(hint, None, None, several, default)
    of, note = get_args(hint)
    choice = note if isinstance(note, tuple) else None
    bounds = note if isinstance(note, Bounds) else None
    return OptionType(of, choice, bounds, several, default)
