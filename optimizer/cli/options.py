"""The values of `pd-optimize`'s options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipedream.graph.choices import InFlight, OptimizerName, Recompute, ScheduleName


@dataclass(frozen=True)
class Options:
    """What was typed, None where nothing was: one field per option, under its Python name."""

    graph: Path

    cluster: Path | None
    machines: str | None
    bandwidth: str | None
    latency: str | None
    speed: float | None
    like: Path | None
    workers: int | None

    profile: Path | None
    cost_model: str | None
    activation_compression: float | None
    update_rate: str | None
    calibrate: tuple[Path, ...]

    objective: str
    straight: bool
    fewer_machines: bool
    epsilon: float | None
    layers: int | None
    split: str | None
    replicas: str | None

    schedule: ScheduleName | None
    order: str | None
    stages_per_rank: int | None
    microbatches: int | None
    global_batch: int | None
    memory: str | None
    optimizer: OptimizerName
    weight_prediction: bool
    recompute: Recompute
    in_flight: InFlight

    mesh: str | None
    shard: tuple[str, ...]

    output: Path | None
    exports: tuple[str, ...]
    timeline: bool
    compare: bool
    sweep: str | None

    @property
    def folder(self) -> Path:
        """The output folder."""
        if self.output is not None:
            return self.output
        return (self.graph if self.graph.is_dir() else self.graph.parent) / "plan"

    @property
    def profile_path(self) -> Path:
        """The profile that the graph came with."""
        return self.profile or self.graph.with_name("profile.json")
