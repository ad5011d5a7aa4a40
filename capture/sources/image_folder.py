"""`torchvision-folder:PATH`: images in folders, one for each class, beneath train/ and val/."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipedream.capture.sources.torchvision import import_torchvision
from pipedream.graph.errors import UserError

HELD_OUT = ("val", "valid", "validation", "test")
IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
"""Mean and standard deviation of the three colours over ImageNet."""


def image_folder(path: Path) -> Callable[..., tuple[Any, Any | None]]:
    """A data factory of what torchvision's ImageFolder reads in `path`.

    An example is (3 x crop x crop of floats, number of the class); classes count in the order of
    their names.
    """

    def torchvision_folder(
        size: int = 256,
        crop: int = 224,
        normalise: bool | Sequence[Sequence[float]] = True,
        augment: bool = False,
    ) -> tuple[Any, Any | None]:
        """The shorter side is made `size` pixels long and `crop` x `crop` from the middle are kept.

        `normalise`: by ImageNet's mean and deviation, by [means, deviations], or not. With
        `augment` a training image is a random part at a random scale, mirrored half of the times.
        """
        import_torchvision()
        folders = importlib.import_module("torchvision.datasets").ImageFolder
        train = _beneath(path, ("train",))
        if train is None:
            raise UserError(
                f"torchvision-folder:{path}: there is no folder train/ in it, with one folder of "
                "images for each class"
            )
        held_out = _beneath(path, HELD_OUT)
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


def _beneath(path: Path, names: Sequence[str]) -> Path | None:
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
