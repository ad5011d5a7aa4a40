"""`timm:NAME`: a model of timm with random weights, and the shape of its inputs."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

from torch import nn

from pipedream.capture.sources.torchvision import import_torchvision
from pipedream.capture.sources.user_code import call, close_matches
from pipedream.graph.errors import UserError


def load_timm(name: str, args: Mapping[str, Any]) -> nn.Module:
    """Creates the model `name`, with random weights unless `args` has `pretrained`.

    With a tag of weights (`resnet50.a1_in1k`) the image size is that of the tag. Raises UserError.
    """
    timm = _import()
    architecture = name.partition(".")[0]
    if not timm.is_model(architecture):
        raise UserError(
            f"timm:{name}: timm has no model of this name"
            + close_matches(architecture, timm.list_models())
        )
    model = call(f"timm:{name}", timm.create_model, {"model_name": name, **args})
    assert isinstance(model, nn.Module)
    return model


def timm_shape(model: nn.Module, args: Mapping[str, Any]) -> str:
    """The shape of an example for the model, in the format of `--input`."""
    config: Any = model.default_cfg
    channels, height, width = config["input_size"]
    side = args.get("img_size", (height, width))
    height, width = side if isinstance(side, (list, tuple)) else (side, side)
    return f"{args.get('in_chans', channels)}x{height}x{width}"


def _import() -> Any:
    if importlib.util.find_spec("timm") is None:
        raise UserError("timm is not installed: pip install 'pipedream[models]'")
    import_torchvision()  # timm imports it too, and fails if it is broken
    return importlib.import_module("timm")
