"""NASNet-A, a network of cells found by architecture search, and enlarged digits; nasnet_a.yaml.

Zoph, Vasudevan, Shlens and Le: Learning Transferable Architectures for Scalable Image Recognition,
CVPR 2018. The cells are those of figure 4, combined as in figure 2 and section 4, without the
auxiliary classifier and without DropPath, which the mobile network does not use.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from digits_cnn import data as digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

PREVIOUS, CURRENT = 0, 1


class Recipe(NamedTuple):
    """The operations of a cell.

    States are the outputs of the two previous cells, older first, then those of `blocks`, numbered
    in this order. A block adds the results of two operations, each given with the state it reads.
    The output concatenates the states `kept`.
    """

    blocks: tuple[tuple[str, int, str, int], ...]
    kept: tuple[int, ...]


NORMAL = Recipe(
    (
        ("separable3", CURRENT, "identity", CURRENT),
        ("separable3", PREVIOUS, "separable5", CURRENT),
        ("average", CURRENT, "identity", PREVIOUS),
        ("average", PREVIOUS, "average", PREVIOUS),
        ("separable5", PREVIOUS, "separable3", PREVIOUS),
    ),
    kept=(PREVIOUS, 2, 3, 4, 5, 6),
)
REDUCTION = Recipe(
    (
        ("separable7", PREVIOUS, "separable5", CURRENT),
        ("max", CURRENT, "separable7", PREVIOUS),
        ("average", CURRENT, "separable5", PREVIOUS),
        ("max", CURRENT, "separable3", 2),
        ("average", 2, "identity", 3),
    ),
    kept=(3, 4, 5, 6),
)


class Enlarged(Dataset[tuple[Tensor, Tensor]]):
    """Grey images [1, h, w], enlarged on access to colour images [3, size, size]."""

    def __init__(self, small: TensorDataset, size: int) -> None:
        self.small = small
        self.size = size

    def __len__(self) -> int:
        return len(self.small)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, digit = self.small[index]
        large = F.interpolate(image.unsqueeze(0), (self.size, self.size), mode="bilinear")
        return large[0].expand(3, -1, -1), digit


def data(size: int = 224) -> tuple[Enlarged, Enlarged]:
    """The digits of scikit-learn as images [3, size, size]: (training set, held-out set)."""
    train, held_out = digits()
    return Enlarged(train, size), Enlarged(held_out, size)


def norm(channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels, eps=1e-3)


def pointwise(channels: int, width: int) -> nn.Module:
    return nn.Sequential(nn.ReLU(), nn.Conv2d(channels, width, 1, bias=False), norm(width))


def separable(channels: int, width: int, size: int, stride: int) -> nn.Module:
    """Two depthwise separable convolutions; the first has the stride."""
    layers: list[nn.Module] = []
    for inside, step in ((channels, stride), (width, 1)):
        layers += [
            nn.ReLU(),
            nn.Conv2d(inside, inside, size, step, size // 2, groups=inside, bias=False),
            nn.Conv2d(inside, width, 1, bias=False),
            norm(width),
        ]
    return nn.Sequential(*layers)


def operation(name: str, channels: int, width: int, stride: int) -> nn.Module:
    match name:
        case "identity":
            return nn.Identity()
        case "average":
            return nn.AvgPool2d(3, stride, 1, count_include_pad=False)
        case "max":
            return nn.MaxPool2d(3, stride, 1)
        case _:
            return separable(channels, width, int(name.removeprefix("separable")), stride)


class Halve(nn.Module):
    """Halves height and width, rounding up: [batch, channels, h, w] to [batch, width, h/2, w/2].

    Half of the output channels come from the even pixels, half from the odd ones.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(channels, width // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(channels, width - width // 2, 1, stride=2, bias=False)
        self.norm = norm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x)
        shifted = F.pad(x, (-1, 1, -1, 1))
        return self.norm(torch.cat([self.even(x), self.odd(shifted)], dim=1))


class Cell(nn.Module):
    """A cell that reads the outputs of the two previous cells and has `out` output channels.

    `channels`: of these two outputs. `halve`: the first of them has twice the height and width.
    `first`: there is one previous output, used as both.
    """

    def __init__(
        self, recipe: Recipe, channels: tuple[int, int], width: int, halve: bool, first: bool
    ) -> None:
        super().__init__()
        before, last = channels
        self.recipe = recipe
        self.out = len(recipe.kept) * width
        if halve:
            self.previous: nn.Module = Halve(before, width)
        elif first or before == width:
            self.previous = nn.Identity()
        else:
            self.previous = pointwise(before, width)
        self.current = pointwise(last, width)
        self.operations = nn.ModuleList()
        for left, one, right, other in recipe.blocks:
            for name, state in ((left, one), (right, other)):
                stride = 2 if recipe is REDUCTION and state in (PREVIOUS, CURRENT) else 1
                inside = before if first and state == PREVIOUS else width
                self.operations.append(operation(name, inside, width, stride))

    def forward(self, previous: Tensor, current: Tensor) -> Tensor:
        states = [self.previous(previous), self.current(current)]
        for block, (_, one, _, other) in enumerate(self.recipe.blocks):
            left, right = self.operations[2 * block], self.operations[2 * block + 1]
            states.append(left(states[one]) + right(states[other]))
        return torch.cat([states[state] for state in self.recipe.kept], dim=1)


class NasNet(nn.Module):
    """Images [batch, 3, h, w] to logits [batch, classes]."""

    def __init__(self, stem: int, width: int, cells: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, stem, 3, stride=2, bias=False), norm(stem))
        plan = [(REDUCTION, width // 4), (REDUCTION, width // 2)]
        for stack in range(3):
            plan += [(REDUCTION, width << stack)] * (stack > 0) + [(NORMAL, width << stack)] * cells
        self.cells = nn.ModuleList()
        before, last, halve = stem, stem, False
        for recipe, inside in plan:
            cell = Cell(recipe, (before, last), inside, halve, first=not self.cells)
            self.cells.append(cell)
            before, last, halve = last, cell.out, recipe is REDUCTION
        self.head = nn.Sequential(
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(0.5),
            nn.Linear(last, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        previous = current = self.stem(x)
        for cell in self.cells:
            previous, current = current, cell(previous, current)
        return self.head(current)


def mobile(stem: int = 32, features: int = 1056, cells: int = 4, classes: int = 1000) -> nn.Module:
    """NASNet-A (4 @ 1056), the mobile network, with `cells` normal cells in each of three stacks.

    `stem`: channels of the first convolution. `features`: channels before the classifier, a
    multiple of 96. Inputs are [batch, 3, 224, 224].
    """
    if features % 96:
        raise ValueError(f"features={features}: give a multiple of 96, such as 1056")
    return NasNet(stem, features // 24, cells, classes)
