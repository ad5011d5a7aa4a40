"""Views: of inputs, parameters and values, kept, returned and written."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.specimens import sequences, specimen


class Layers(nn.Module):
    """Two linear layers, for views of what lies in between."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        return self.b(self.between(self.a(x)))

    def between(self, h: Tensor) -> Tensor:
        raise NotImplementedError


@specimen(sequences)
class Transposed(Layers):
    def between(self, h: Tensor) -> Tensor:
        return h.transpose(1, 2).tanh().transpose(1, 2)


@specimen(sequences)
class Permuted(Layers):
    def between(self, h: Tensor) -> Tensor:
        h = h.permute(2, 0, 1).cumsum(0)
        return h.permute(1, 2, 0)


@specimen(sequences)
class Heads(Layers):
    def between(self, h: Tensor) -> Tensor:
        q = h.view(*h.shape[:2], 2, 3).transpose(1, 2)
        return (q @ q.transpose(-1, -2) @ q).transpose(1, 2).reshape(h.shape)


@specimen(sequences)
class Unfolded(Layers):
    """Windows that overlap."""

    def between(self, h: Tensor) -> Tensor:
        return h.unfold(1, 3, 1).mean(-1)


@specimen()
class AsStrided(Layers):
    def between(self, h: Tensor) -> Tensor:
        return h.contiguous().as_strided((len(h), 6), (6, 1)) * h.as_strided((len(h), 1), (6, 1), 2)


@specimen()
class Expanded(Layers):
    def between(self, h: Tensor) -> Tensor:
        return (h[:, :1].expand(-1, 6) * h).exp()


@specimen()
class Chunked(Layers):
    def between(self, h: Tensor) -> Tensor:
        one, two, three = h.chunk(3, -1)
        return torch.cat([three, one * two, two], -1)


@specimen()
class SplitUneven(Layers):
    def between(self, h: Tensor) -> Tensor:
        few, many = h.split([2, 4], -1)
        return torch.cat([many, few.sin()], -1)


@specimen(sequences)
class Unbound(Layers):
    def between(self, h: Tensor) -> Tensor:
        first, *others = h.unbind(1)
        return torch.stack([first * other for other in others], 1)


@specimen(sequences)
class NarrowedAndSelected(Layers):
    def between(self, h: Tensor) -> Tensor:
        return h.narrow(1, 1, 3) + h.select(1, 4)[:, None]


@specimen()
class Diagonal(Layers):
    def between(self, h: Tensor) -> Tensor:
        outer = h[:, :, None] * h[:, None]
        return torch.diagonal(outer, dim1=1, dim2=2) + outer.sum(2)


@specimen(sequences)
class Flipped(Layers):
    def between(self, h: Tensor) -> Tensor:
        return h.flip(1).roll(2, 1) + torch.rot90(h, 2, (1, 2))


@specimen()
class ViewOfWeight(Layers):
    """A part of a parameter, transposed."""

    def between(self, h: Tensor) -> Tensor:
        return h @ self.a.weight[:, :3] @ self.b.weight.T[:3]


@specimen()
class ViewReturned(Layers):
    """Two outputs that share memory."""

    def forward(self, x: Tensor) -> Any:
        h = self.b(torch.tanh(self.a(x)))
        return h, h[:, :2], h.T


@specimen()
class InputReturned(Layers):
    def forward(self, x: Tensor) -> Any:
        return self.b(torch.tanh(self.a(x))), x


@specimen()
class InputViewReturned(Layers):
    def forward(self, x: Tensor) -> Any:
        return x[:, 1:3], self.b(torch.tanh(self.a(x)))


@specimen()
class ParameterReturned(Layers):
    """The loss has a term of a weight that the model returns."""

    def forward(self, x: Tensor) -> Any:
        return self.b(torch.tanh(self.a(x))), self.a.weight


@specimen()
class ParameterAlone(nn.Module):
    """A penalty made of a parameter that the model does not use otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.scale = nn.Linear(6, 6), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.a(x)), self.scale.square().sum()


@specimen()
class BufferReturned(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Buffer(torch.arange(6.0))

    def forward(self, x: Tensor) -> Any:
        return self.b(torch.tanh(self.a(x))), self.table


@specimen()
class EarlyOutput(Layers):
    """What an early layer gives is returned, and read by the last."""

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        return h, self.b(torch.tanh(h)) + h


@specimen()
class SizeOne(Layers):
    """Dimensions of one come and go."""

    def between(self, h: Tensor) -> Tensor:
        return h[:, None].squeeze(1).unsqueeze(-1).expand(-1, -1, 1).contiguous().squeeze(-1)


@specimen(sequences)
class NotContiguous(nn.Module):
    """What crosses is transposed in memory; reshape, not view, reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(6, 6, 1), nn.Linear(30, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x.transpose(1, 2)).transpose(1, 2)
        return self.b(torch.relu(h).reshape(len(h), -1))


@specimen(sequences)
class Shuffled(Layers):
    """Channel shuffle, and a pixel shuffle of what is left."""

    def between(self, h: Tensor) -> Tensor:
        h = F.channel_shuffle(h.transpose(1, 2)[..., None], 2)[..., 0].transpose(1, 2)
        return h.movedim(1, 2).swapdims(1, 2)
