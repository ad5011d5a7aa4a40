"""`torchvision:NAME` and `timm:NAME`: models with random weights, and their input shapes."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from pipedream.capture.errors.user_code import call, close_matches, import_torchvision
from pipedream.graph.errors import UserError

# Modules whose models map a batch of images or clips to a tensor.
_TASKS = ("models", "models.segmentation", "models.video")


def load_torchvision(name: str, args: Mapping[str, Any]) -> nn.Module:
    """Creates the model, with random weights unless `args` has `weights`. Raises UserError."""
    _task(name)
    models = importlib.import_module("torchvision.models")
    builder = models.get_model_builder(name)
    takes = inspect.signature(builder).parameters
    random = {key: None for key in ("weights", "weights_backbone") if key in takes}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of inception, about its initialisation
        model = call(f"torchvision:{name}", builder, {**random, **args})
    assert isinstance(model, nn.Module)
    return model


def image_shape(name: str, args: Mapping[str, Any]) -> str:
    """The shape of an example for the model, in the format of `--input`."""
    side = args.get("image_size", 299 if name == "inception_v3" else 224)
    if not _task(name).endswith("video"):
        return f"3x{side}x{side}"
    small = ("r3d", "mc3", "r2plus1d")
    return "3x16x112x112" if name.startswith(small) else "3x16x224x224"


def _task(name: str) -> str:
    """The module in `_TASKS` that has the model. Raises UserError."""
    import_torchvision()
    models = importlib.import_module("torchvision.models")
    known = {
        model: task
        for task in _TASKS
        for model in models.list_models(module=importlib.import_module(f"torchvision.{task}"))
    }
    detection = importlib.import_module("torchvision.models.detection")
    if name in models.list_models(module=detection):
        raise UserError(
            f"torchvision:{name}: detection models are not supported, because their control flow "
            "depends on the data: profile the backbone instead"
        )
    if name not in known:
        raise UserError(
            f"torchvision:{name}: torchvision has no image or video model of this name"
            + close_matches(name, known)
        )
    return known[name]


def load_timm(name: str, args: Mapping[str, Any]) -> nn.Module:
    """Creates the model `name`, with random weights unless `args` has `pretrained`.

    With a tag of weights (`resnet50.a1_in1k`) the image size is that of the tag. Raises UserError.
    """
    timm = _import_timm()
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


def _import_timm() -> Any:
    if importlib.util.find_spec("timm") is None:
        raise UserError("timm is not installed: pip install 'pipedream[models]'")
    import_torchvision()  # timm imports it too, and fails if it is broken
    return importlib.import_module("timm")
