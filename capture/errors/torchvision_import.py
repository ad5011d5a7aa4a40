"""Imports torchvision, also where it was built for another torch."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from pipedream.graph.errors import UserError

TORCHVISION_MISMATCH = "torchvision::nms does not exist"
"""In the error of a torchvision that was built for another torch."""

_fragment: torch.library.Library | None = None  # its declarations end when it is collected


def import_torchvision() -> ModuleType:
    """Imports torchvision, even if its compiled operators do not match the installed torch.

    Wheels for another build of torch (CUDA or CPU) fail at import when they register shapes for
    `nms`, an operator of detection models, which are not supported here. Declaring the two missing
    operators without an implementation lets the import succeed. Raises UserError if torchvision is
    not installed.
    """
    global _fragment
    try:
        return importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        raise UserError("torchvision is not installed: pip install 'pipedream[models]'") from error
    except RuntimeError as error:
        if TORCHVISION_MISMATCH not in str(error) or _fragment is not None:
            raise
    _fragment = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        schema = f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        _fragment.define(schema)  # type: ignore[no-untyped-call]
    return importlib.import_module("torchvision")
