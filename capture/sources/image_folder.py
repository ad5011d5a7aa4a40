"""`torchvision-folder:PATH`: images in train/ and val/, with a folder for each class."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipedream.capture.errors.user_code import import_torchvision
from pipedream.graph.errors import UserError

HELD_OUT = ("val", "valid", "validation", "test")
IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
"""Mean and standard deviation of the colour channels of ImageNet."""


def image_folder(path: Path) -> Callable[..., tuple[Any, Any | None]]:
    """A data factory for images that torchvision's ImageFolder reads from `path`.

    An example is (float tensor [3, crop, crop], class index); classes are sorted by name.
    """

    def torchvision_folder(
        size: int = 256,
        crop: int = 224,
        normalise: bool | Sequence[Sequence[float]] = True,
        augment: bool = False,
    ) -> tuple[Any, Any | None]:
        """Resizes the shorter side to `size` pixels and crops `crop` x `crop` from the middle.

        `normalise`: with ImageNet's mean and deviation (True), with [means, deviations], or not
        (False). `augment`: random crops, scales and mirroring of training images.
        """
        import_torchvision()
        folders = importlib.import_module("torchvision.datasets").ImageFolder
        train = _subfolder(path, ("train",))
        if train is None:
            raise UserError(
                f"torchvision-folder:{path}: there is no folder train/ in it: create it, with a "
                "folder of images for each class"
            )
        held_out = _subfolder(path, HELD_OUT)
        whole = _transform(size, crop, normalise, augment=False)
        training = folders(str(train), _transform(size, crop, normalise, augment))
        if held_out is None:
            return training, None
        other = folders(str(held_out), whole)
        if other.classes != training.classes:
            differing = min(set(other.classes) ^ set(training.classes))
            raise UserError(
                f"torchvision-folder:{path}: train/ and {held_out.name}/ have different classes: "
                f"{differing} is in one of them only"
            )
        return training, other

    return torchvision_folder


def _subfolder(path: Path, names: Sequence[str]) -> Path | None:
    return next((path / name for name in names if (path / name).is_dir()), None)


def _transform(
    size: int, crop: int, normalise: bool | Sequence[Sequence[float]], augment: bool
) -> Any:
    transforms = importlib.import_module("torchvision.transforms")
    if augment:
        steps = [transforms.RandomResizedCrop(crop), transforms.RandomHorizontalFlip()]
    else:
        steps = [transforms.Resize(size), transforms.CenterCrop(crop)]
    steps.append(transforms.ToTensor())
    if normalise:
        mean, deviation = IMAGENET if normalise is True else normalise
        steps.append(transforms.Normalize(mean, deviation))
    return transforms.Compose(steps)
