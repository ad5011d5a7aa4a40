"""Buffers, as models keep and change them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.specimens import add, between, pictures, sequences, specimen


class Layers(nn.Module):
    """Two linear layers, for what is done with buffers in between."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a(x)))

    def between(self, h: Tensor) -> Tensor:
        raise NotImplementedError


@specimen()
class Counter(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Buffer(torch.zeros((), dtype=torch.long))

    def between(self, h: Tensor) -> Tensor:
        self.count += 1
        return h / self.count


@specimen()
class CounterReadBefore(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Buffer(torch.ones(()))

    def between(self, h: Tensor) -> Tensor:
        h = h / self.count.clone()
        self.count.add_(1)
        return h


@specimen()
class CounterUnread(Layers):
    """Nothing in a pass reads what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Buffer(torch.zeros((), dtype=torch.long))

    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.count.add_(1)
        return h


@specimen()
class Average(Layers):
    """An exponential mean under no_grad, of what the pass itself does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Buffer(torch.zeros(6))

    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
        return h.tanh()


@specimen()
class AverageRead(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Buffer(torch.zeros(6))

    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(h.mean(0), 0.3)
        return h - self.mean


@specimen()
class AverageReadBefore(Layers):
    """The mean of earlier minibatches centres this one, which then goes into it."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Buffer(torch.zeros(6))

    def between(self, h: Tensor) -> Tensor:
        centred = h - self.mean
        with torch.no_grad():
            self.mean.lerp_(h.mean(0), 0.3)
        return centred * centred


@specimen()
class Copied(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Buffer(torch.zeros(6))

    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.last.copy_(h[-1])
        return h


@specimen()
class CopiedDetached(Layers):
    """As before, without no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Buffer(torch.zeros(6))

    def between(self, h: Tensor) -> Tensor:
        out = h + self.last
        self.last.copy_(h[-1].detach())
        return out


@specimen()
class Reassigned(Layers):
    """The attribute is set to a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Buffer(torch.zeros(6))

    def between(self, h: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * h.mean(0).detach()
        return h - self.mean


@specimen()
class Queue(Layers):
    """Keys of earlier minibatches, as in MoCo; where it goes on is a buffer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.at = nn.Buffer(torch.zeros(8, 6)), nn.Buffer(torch.zeros(1).long())

    def between(self, h: Tensor) -> Tensor:
        out = h @ self.queue.clone().T @ self.queue.clone() + h
        with torch.no_grad():
            places = (self.at + torch.arange(len(h))) % 8
            self.queue[places] = h
            self.at.copy_((self.at + len(h)) % 8)
        return out


@specimen()
class QueueShifted(Layers):
    """The oldest row goes out as a new one comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = nn.Buffer(torch.zeros(3, 6))

    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.queue.copy_(torch.cat([self.queue[1:], h.mean(0, keepdim=True)]))
        return h + self.queue.mean(0)


@specimen()
class CodeBook(Layers):
    """As in VQ-VAE: how often each code was used, and a straight-through gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Buffer(torch.randn(5, 6))
        self.used = nn.Buffer(torch.zeros(5))

    def between(self, h: Tensor) -> Tensor:
        nearest = torch.cdist(h, self.codes.clone()).argmin(1)
        with torch.no_grad():
            self.used.index_add_(0, nearest, torch.ones(len(h), dtype=h.dtype))
        picked = self.codes[nearest]
        return h + (picked - h).detach()


@specimen()
class CodeBookLearned(Layers):
    """As before, and the codes move to the mean of what was nearest."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Buffer(torch.randn(5, 6))
        self.used = nn.Buffer(torch.ones(5))

    def between(self, h: Tensor) -> Tensor:
        nearest = torch.cdist(h, self.codes.clone()).argmin(1)
        picked = self.codes[nearest]
        if self.training:
            with torch.no_grad():
                hot = nn.functional.one_hot(nearest, 5).to(h.dtype)
                self.used.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.codes.mul_(0.9).add_(hot.T @ h / self.used[:, None], alpha=0.1)
        return h + (picked - h).detach()


@specimen()
class IndexAssigned(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Buffer(torch.zeros(4, 6))

    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.table[1] = h.mean(0)
            self.table[:, 0] += 1
        return h


@specimen()
class OnlyInTraining(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.most = nn.Buffer(torch.full((6,), 0.1))

    def between(self, h: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.most.copy_(torch.maximum(self.most, h.abs().amax(0)))
        return h / self.most


@specimen()
class InEvalToo(Layers):
    """Counts in eval mode as well."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = nn.Buffer(torch.zeros(()))

    def between(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h * self.calls


@specimen()
class NotSaved(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Buffer(torch.linspace(0.5, 1.5, 6), persistent=False)
        self.seen = nn.Buffer(torch.zeros(6), persistent=False)

    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen.add_(h.mean(0))
        return h * self.scale + self.seen


@specimen()
class NoneBuffer(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", None)

    def between(self, h: Tensor) -> Tensor:
        return h if self.shift is None else h + self.shift


class Counted(nn.Module):
    """Adds to a buffer that it does not have alone."""

    def __init__(self, count: nn.Buffer) -> None:
        super().__init__()
        self.layer, self.count = nn.Linear(6, 6), count

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.layer(x) / self.count.clone()


@specimen()
def shared_by_two() -> nn.Module:
    count = nn.Buffer(torch.zeros(()))
    return nn.Sequential(Counted(count), nn.Tanh(), Counted(count))


class ReadsAcross(nn.Module):
    """One layer writes what another reads, far away."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.scale = nn.Buffer(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.no_grad():
            self.scale.mul_(0.5).add_(h.abs().mean())
        h = self.b(h.tanh()).tanh()
        return self.c(h * self.scale)


add("reads across", ReadsAcross, kind="buffers")


@specimen()
class TwoWrites(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.state = nn.Buffer(torch.ones(6))

    def between(self, h: Tensor) -> Tensor:
        self.state.mul_(0.5)
        h = h * self.state.clone()
        self.state.add_(1.0)
        return h + self.state


@specimen()
class WrittenThroughView(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.state = nn.Buffer(torch.ones(2, 3))

    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.state.view(6).add_(h.mean(0))
        return h + self.state.view(6)


@specimen()
class SwitchedOn(Layers):
    """As in activation norm: the first minibatch sets what later ones use."""

    def __init__(self) -> None:
        super().__init__()
        self.ready, self.shift = nn.Buffer(torch.tensor(False)), nn.Buffer(torch.zeros(6))

    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.shift.copy_(torch.where(self.ready, self.shift, h.mean(0)))
            self.ready.fill_(True)
        return h - self.shift


@specimen(sequences)
class Positions(nn.Module):
    """A table that only is read, in part."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 2)
        self.table = nn.Buffer(torch.randn(1, 10, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x) + self.table[:, : x.shape[1]]))


NORMS = {
    "batch norm": lambda: nn.BatchNorm1d(6),
    "batch norm, cumulative": lambda: nn.BatchNorm1d(6, momentum=None),
    "batch norm, not tracking": lambda: nn.BatchNorm1d(6, track_running_stats=False),
    "batch norm, not affine": lambda: nn.BatchNorm1d(6, affine=False),
    "batch norm, momentum 0.5": lambda: nn.BatchNorm1d(6, momentum=0.5),
    "sync batch norm": lambda: nn.SyncBatchNorm(6),
}
REFUSED = {
    "batch norm, cumulative": "depends on the data",
    "sync batch norm": "PyTorch itself.*GPU",
}
for _name, _make in NORMS.items():
    add(_name, lambda make=_make: between(make()), kind="buffers", refused=REFUSED.get(_name))  # type: ignore[misc]


@specimen()
class BatchNormInEval(Layers):
    """Frozen statistics: the norm stays in eval mode whatever the model is put in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.norm.running_mean.uniform_(-1, 1)  # type: ignore[union-attr]

    def train(self, mode: bool = True) -> BatchNormInEval:
        super().train(mode)
        self.norm.eval()
        return self

    def between(self, h: Tensor) -> Tensor:
        return self.norm(h)


@specimen()
class SameNormTwice(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def between(self, h: Tensor) -> Tensor:
        return self.norm(self.a(self.norm(h)))


def _pictured(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Conv2d(4, 2, 3))


add("batch norm 2d", lambda: _pictured(nn.BatchNorm2d(4)), pictures, kind="buffers")
add("instance norm", lambda: _pictured(nn.InstanceNorm2d(4, affine=True)), pictures, kind="buffers")
add(
    "instance norm, tracking",
    lambda: _pictured(nn.InstanceNorm2d(4, track_running_stats=True)),
    pictures,
    kind="buffers",
)
