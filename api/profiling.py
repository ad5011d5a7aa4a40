"""`pipedream.profile`: pd-profile for a model that is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from pipedream.command_line import checked
from pipedream.graph.errors import UserError
from pipedream.graph.units import show_seconds
from pipedream.profiler.assembly import Measured
from pipedream.profiler.report.files import write_files

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, repr=False)
class Profiled(Measured):
    """A model with the times and sizes of its layers."""

    @property
    def layers(self) -> pd.DataFrame:
        """A row for each layer in order of execution; seconds and bytes per minibatch."""
        from pipedream.profiler.report.layers import layers_frame

        return layers_frame(self.profile)

    def write(self, folder: str | Path) -> Path:
        """Writes the files of pd-profile; returns the folder. Raises UserError."""
        write_files(self, Path(folder))
        return Path(folder)

    def __repr__(self) -> str:
        totals = self.profile.totals
        return (
            f"<{self.profile.title}: {len(self.profile.nodes)} nodes,"
            f" forward {show_seconds(totals.forward_seconds)},"
            f" backward {show_seconds(totals.backward_seconds)}>"
        )

    def _repr_html_(self) -> str:
        from pipedream.profiler.report.layers import shown_layers

        table = shown_layers(self.profile).to_html(index=False, max_rows=30)
        return f"<b>{escape(self.profile.title)}</b>{table}"


@checked
def profile(
    model: nn.Module,
    inputs: Tensor | Sequence[Any] | Mapping[str, Any],
    *,
    loss: Callable[[Any], Tensor] | None = None,
    autocast: Literal["bfloat16", "float16"] | None = None,
    device: str = "cpu",
    threads: int = 1,
    warmup: int | None = None,
    repeats: int | None = None,
    seconds: float = 30.0,
) -> Profiled:
    """Measures every layer of `model`, called with `inputs`: a tensor, several, or a mapping of
    keyword arguments; the first dimension of the tensors are the examples.

    `loss` of what the model returns makes the passes those of training. The others are the options
    of pd-profile. Raises UserError.
    """
    from pipedream.capture.captured import flatten_inputs
    from pipedream.capture.compute_settings import to_train
    from pipedream.capture.sources.load import Loaded
    from pipedream.profiler.assembly import Settings
    from pipedream.profiler.measure import measure
    from pipedream.profiler.timing.stopping_rule import StoppingRule

    if not isinstance(model, nn.Module):
        instead = ": call it, profile(factory(), ...)" if callable(model) else ""
        raise UserError(
            f"profile: model: this is a {type(model).__name__}, not a torch.nn.Module{instead}"
        )
    args, kwargs = _arguments(inputs)
    tensors = flatten_inputs(args, kwargs)
    if not tensors or not tensors[0].dim():
        raise UserError("profile: inputs: give tensors whose first dimension are the examples")
    of_output = None if loss is None else lambda output, _target: loss(output)
    loaded = Loaded(to_train(model), args, kwargs, autocast, of_output, target=())
    settings = Settings(
        model=f"{type(model).__module__}:{type(model).__qualname__}",
        args={},
        batch_size=len(tensors[0]),
        device=torch.device(device),
        stopping_rule=StoppingRule(warmup, repeats, seconds),
        threads=threads,
    )
    before = torch.get_num_threads()
    try:
        return Profiled(**vars(measure(loaded, settings)))
    finally:
        torch.set_num_threads(before)


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs,) if isinstance(inputs, Tensor) else tuple(inputs), {}
