"""Writes in place, as models have them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.specimens import add, between, pictures, sequences, specimen


class Layers(nn.Module):
    """Two linear layers, for what is written in between."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a(x)))

    def between(self, h: Tensor) -> Tensor:
        raise NotImplementedError


@specimen()
class Relu(Layers):
    def between(self, h: Tensor) -> Tensor:
        return h.relu_()


@specimen()
class ReluOfResidual(Layers):
    """As in ResNet: the sum is written in place, then read twice."""

    def between(self, h: Tensor) -> Tensor:
        h = F.relu(h + torch.tanh(h), inplace=True)
        return h + self.a(h)


@specimen()
class AddAssign(Layers):
    def between(self, h: Tensor) -> Tensor:
        h += 1.0
        h *= torch.sigmoid(h.detach())
        return h


@specimen()
class AddAssignInput(nn.Module):
    """The residual is added into what a layer gave."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h += x
        out = self.b(h)
        out += h
        return out


@specimen()
class ColumnSet(Layers):
    def between(self, h: Tensor) -> Tensor:
        h = h.tanh()
        h = h * 1
        h[:, 0] = 0.0
        return h


@specimen()
class ColumnFromColumn(Layers):
    """A column is written from another one, with a gradient."""

    def between(self, h: Tensor) -> Tensor:
        h = h.clone()
        h[:, 0] = h[:, 1] * 2
        return h.sin()


@specimen()
class ColumnScaled(Layers):
    def between(self, h: Tensor) -> Tensor:
        h[:, 2:4] *= 3.0
        h[:, :1] += h[:, 5:]
        return h


@specimen()
class MaskedFill(Layers):
    def between(self, h: Tensor) -> Tensor:
        return h.masked_fill_(h > 0.3, -1.0)


@specimen()
class MaskedAssign(Layers):
    """A boolean index that is written to has a fixed shape."""

    def between(self, h: Tensor) -> Tensor:
        h = h.clone()
        h[h < 0] = 0.1
        return h


@specimen()
class Clamp(Layers):
    def between(self, h: Tensor) -> Tensor:
        return h.clamp_(-0.5, 0.5)


@specimen()
class AddOnView(Layers):
    """The base is read after a view of it was written."""

    def between(self, h: Tensor) -> Tensor:
        h.view(-1, 2, 3).add_(1.0)
        return h


@specimen()
class AddOnTransposed(Layers):
    def between(self, h: Tensor) -> Tensor:
        view = h.transpose(0, 1)
        view.mul_(torch.arange(1.0, 7.0, dtype=h.dtype)[:, None])
        return h + view.sum()


@specimen()
class BaseWrittenViewRead(Layers):
    """The view is read after its base was written."""

    def between(self, h: Tensor) -> Tensor:
        view = h[:, :3]
        h.mul_(2.0)
        return torch.cat([view, h[:, 3:].tanh()], 1)


@specimen()
class SliceOfSlice(Layers):
    def between(self, h: Tensor) -> Tensor:
        part = h[:, 1:5]
        part[:, 1:3].neg_()
        return h * part.sum(1, keepdim=True)


@specimen()
class Out(Layers):
    """A function writes its result into memory that was made for it."""

    def between(self, h: Tensor) -> Tensor:
        room = torch.empty_like(h.detach())
        torch.mul(h.detach(), 2.0, out=room)
        return h + room


@specimen()
class Copy(Layers):
    def between(self, h: Tensor) -> Tensor:
        room = torch.zeros_like(h)
        room.copy_(h)
        return room.cos()


@specimen()
class CopyIntoSlices(Layers):
    def between(self, h: Tensor) -> Tensor:
        room = h.new_zeros(len(h), 9)
        room[:, :6].copy_(h)
        room[:, 6:] = h[:, :3].exp()
        return room[:, 2:8]


@specimen()
class Scatter(Layers):
    def between(self, h: Tensor) -> Tensor:
        places = torch.arange(6).flip(0).expand(len(h), 6)
        return torch.zeros_like(h).scatter_(1, places, h) * h


@specimen()
class ScatterAdd(Layers):
    def between(self, h: Tensor) -> Tensor:
        places = torch.tensor([0, 0, 1, 1, 2, 5]).expand(len(h), 6)
        return torch.zeros_like(h).scatter_add_(1, places, h.sin())


@specimen()
class IndexPut(Layers):
    def between(self, h: Tensor) -> Tensor:
        h = h.clone()
        h.index_put_((torch.tensor([0]), torch.tensor([2])), h[0, 3].tanh())
        return h


@specimen()
class IndexAssign(Layers):
    def between(self, h: Tensor) -> Tensor:
        h = h + 0
        h[:, torch.tensor([0, 2])] = h[:, torch.tensor([1, 3])].tanh()
        return h


@specimen()
class IndexAdd(Layers):
    def between(self, h: Tensor) -> Tensor:
        return torch.zeros_like(h).index_add_(1, torch.tensor([5, 4, 3, 2, 1, 1]), h)


@specimen()
class FillDiagonal(Layers):
    def between(self, h: Tensor) -> Tensor:
        square = h.T @ h
        square.fill_diagonal_(0.0)
        return h @ square


@specimen()
class Swap(Layers):
    def between(self, h: Tensor) -> Tensor:
        h = h.clone()
        first = h[:, 0].clone()
        h[:, 0] = h[:, 1]
        h[:, 1] = first
        return h * torch.arange(6.0, dtype=h.dtype)


@specimen()
class ChunkThenWrite(Layers):
    """Of two halves of the same memory, one is written from the other."""

    def between(self, h: Tensor) -> Tensor:
        h = h * 1.0
        one, other = h[:, :3], h[:, 3:]
        one.add_(other.tanh())
        return h


@specimen()
class SavedThenWritten(Layers):
    """What sigmoid has saved is not its input, which is then written."""

    def between(self, h: Tensor) -> Tensor:
        gate = h.sigmoid()
        h.mul_(2.0)
        return gate * h


@specimen()
class ManyInARow(Layers):
    def between(self, h: Tensor) -> Tensor:
        return h.add_(0.1).mul_(1.5).clamp_(min=-0.8).sub_(0.2).tanh_()


@specimen()
class WrittenInLoop(Layers):
    """As a state that is updated step by step."""

    def between(self, h: Tensor) -> Tensor:
        state = torch.zeros_like(h)
        for step in range(3):
            state.mul_(0.5).add_(h * (step + 1))
        return state


@specimen()
class WritesIntoInput(Layers):
    """The minibatch is changed in place: whoever reads it later sees that."""

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        return self.b(self.a(x).tanh()) + x


@specimen(sequences)
class ZerosThenRows(nn.Module):
    """Padding by hand: rows are written into what is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        padded = h.new_zeros(len(h), 8, 4)
        padded[:, 1:6] = h
        padded[:, 0] = h[:, -1]
        return self.b(padded)


@specimen()
class NormalizedInPlace(Layers):
    def between(self, h: Tensor) -> Tensor:
        h.sub_(h.mean(1, keepdim=True))
        h.div_(h.detach().abs().amax(1, keepdim=True))
        return h


@specimen()
class ListOfStates(Layers):
    """A tensor of a list is written after the list was read."""

    def between(self, h: Tensor) -> Tensor:
        states = [h * k for k in range(1, 4)]
        total = states[0] + states[1]
        states[1].mul_(2.0)
        return total + states[1] * states[2]


@specimen()
class Requantized(Layers):
    """Writes under no_grad into what has a gradient, through detach."""

    def between(self, h: Tensor) -> Tensor:
        h = h * 1.0
        with torch.no_grad():
            h.detach().clamp_(-1.0, 1.0)
        return h


@specimen()
class WrittenUnderNoGrad(Layers):
    """A mask is built in place under no_grad and read outside."""

    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            mask = torch.zeros_like(h)
            mask[h > 0] = 1.0
            mask[:, 0] = 0.5
        return h * mask


add(
    "activations",
    lambda: nn.Sequential(
        nn.Linear(6, 6),
        nn.ELU(inplace=True),
        nn.Linear(6, 6),
        nn.LeakyReLU(0.1, inplace=True),
        nn.Linear(6, 6),
        nn.SiLU(inplace=True),
        nn.Hardtanh(inplace=True),
        nn.Linear(6, 6),
        nn.Mish(inplace=True),
        nn.Hardswish(inplace=True),
        nn.Threshold(0.1, 0.0, inplace=True),
    ),
    kind="inplace",
)
add("shared relu", lambda: _shared_relu(), pictures, kind="inplace")
add("relu first", lambda: nn.Sequential(nn.ReLU(inplace=True), between(nn.Tanh())), kind="inplace")


def _shared_relu() -> nn.Module:
    relu = nn.ReLU(inplace=True)
    return nn.Sequential(nn.Conv2d(3, 4, 3), relu, nn.Conv2d(4, 4, 3), relu, nn.Conv2d(4, 2, 1))
