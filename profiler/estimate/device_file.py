"""Device files, `pipedream-device/1`: what a device does in a second, and where that is from."""

from __future__ import annotations

from difflib import get_close_matches
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from pipedream.graph.errors import ArtifactModel, UserError, read_artifact

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Point = Annotated[tuple[float, ...], Field(min_length=2)]


class MeasuredError(ArtifactModel):
    """How far estimates were from measured profiles of models that the file was not fitted to."""

    node: _Positive
    """Median, relative, over the nodes, as they weigh."""
    model: _Positive
    """Median, relative, over whole passes."""
    worst: _Positive
    """The largest of these."""
    models: tuple[str, ...]


class DeviceFile(ArtifactModel):
    """What a device does in a second. Efficiencies are parts of the roofline: of `peak` where an
    operator computes, of `bandwidth` where it moves bytes.
    """

    format: Literal["pipedream-device/1"] = "pipedream-device/1"
    name: str
    """As it calls itself."""
    device: Literal["cpu", "cuda"]
    """The kind of torch's devices."""
    sources: tuple[str, ...] = Field(min_length=1)
    """Where its figures are from."""
    memory: _Positive
    """Bytes."""
    bandwidth: _Positive
    """Bytes of memory per second."""
    host_bandwidth: _Positive | None = None
    """Bytes per second between the device and its host, each way; None where that is not known."""
    peak: dict[str, _Positive] = Field(min_length=1)
    """Flops per second by type."""
    launch: _Positive
    """Seconds that no operator is below."""
    host: dict[str, _Positive] = Field(default_factory=dict)
    """By kind of work: seconds that the host takes to hand an operator over, where the device
    computes meanwhile; `usual` for other kinds. Empty where it does not.
    """
    host_backward: dict[str, _Positive] = Field(default_factory=dict)
    """The same backwards."""
    efficiencies_of: str | None = None
    """The device that has been measured in its place; None if it was itself."""
    updates: dict[str, _Positive] = Field(default_factory=dict)
    """By optimizer: the part of `bandwidth` that its step gets."""
    efficiency: dict[str, dict[str, tuple[_Point, ...]]] = Field(default_factory=dict)
    """By kind of work and type: sizes, as binary logarithms, and the part of the roofline."""
    error: MeasuredError | None = None
    """None if it was not compared."""


@lru_cache
def read_device(name: str) -> DeviceFile:
    """Reads a file of `devices/` by its name, or one at a path that ends in .yaml, with the
    efficiencies of the device that stands in its place. Raises UserError.
    """
    path = _path(name)
    file = read_artifact(path, DeviceFile)
    if file.efficiencies_of is None:
        if not file.efficiency:
            raise UserError(f"{path}: needs `efficiency`, or `efficiencies_of` another device")
        return file
    other = read_artifact(_path(file.efficiencies_of), DeviceFile)
    if other.efficiencies_of is not None:
        raise UserError(
            f"{path}: efficiencies_of: {file.efficiencies_of} has none of its own: name a device"
            " that was measured"
        )
    return file.model_copy(
        update={
            "efficiency": other.efficiency,
            "host": other.host,
            "host_backward": other.host_backward,
            "updates": other.updates,
            "error": other.error,
        }
    )


def _path(name: str) -> Path:
    """Returns the path of a device file. Raises UserError for a name that is not known."""
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        path = _shipped() / f"{name}.yaml"
        if not path.is_file():
            known = sorted(each.stem for each in _shipped().glob("*.yaml"))
            likely = get_close_matches(name, known, n=1)
            raise UserError(
                f"--for {name}: there is no file of this device: name {' or '.join(likely)}"
                if likely
                else f"--for {name}: there is no file of this device: name one of"
                f" {', '.join(known)}, or the path of a device file that ends in .yaml"
            )
    return path


def _shipped() -> Path:
    return Path(str(resources.files("pipedream.profiler.estimate") / "devices"))
