"""Small models and data for runs of several processes; named in run configs as small_models:X."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, IterableDataset, TensorDataset


class Layer(nn.Module):
    """A linear layer and a bend: two nodes, both with a gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Chain(nn.Module):
    """Three layers one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Layer(6), Layer(6), Layer(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)))


class Tied(Chain):
    """Its first and its last layer share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.c.linear.weight = self.a.linear.weight


class FrozenFirst(Chain):
    """Chain, whose first layer does not learn."""

    def __init__(self) -> None:
        super().__init__()
        self.a.requires_grad_(False)


class Skips(nn.Module):
    """Three layers with skips from the first to the third, one of them past the second."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Layer(6), Layer(6), Layer(6)

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        second = self.b(first)
        return self.c(second + first) * first


class Marks(nn.Module):
    """What has no gradient: an order of int64, a mask of bool."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.argsort(dim=1), x > 0


class Sorted(nn.Module):
    """An order and a mask of the first part's output are used in the third."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.marks, self.b, self.c = Layer(6), Marks(), Layer(6), Layer(6)

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        order, mask = self.marks(first)
        return self.c(torch.where(mask, self.b(first), first).gather(1, order))


def regression(examples: int = 64) -> tuple[TensorDataset, None]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(examples, 6, generator=generator, dtype=torch.float64)
    y = torch.randn(examples, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, y), None


LENGTHS = 8


def sentences(examples: int = 64) -> tuple[TensorDataset, None]:
    """As regression, at each of several places; `cut` makes minibatches of different lengths."""
    generator = torch.Generator().manual_seed(7)
    x, y = torch.randn(2, examples, LENGTHS, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, y), None


def cut(examples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """[examples, length, 6] of both; the length depends on what the first example is."""
    x, y = (torch.stack(part) for part in zip(*examples, strict=True))
    length = 1 + int(1e6 * float(x[0, 0, 0].abs())) % LENGTHS
    return x[:, :length], y[:, :length]


class Tail(nn.Module):
    """The third part of Skips, by itself: (second, first) to the output."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.c = layer

    def forward(self, second: Tensor, first: Tensor) -> Tensor:
        return self.c(second + first) * first


class Normed(nn.Module):
    """Two layers with batch norm between: its statistics move with the replica they are on."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.c = Layer(6), nn.BatchNorm1d(6), Layer(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.norm(self.a(x)))


def images(size: int, examples: int = 4) -> tuple[TensorDataset, None]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(examples, 3, size, size, generator=generator)
    return TensorDataset(x, torch.zeros(examples)), None


def tokens(length: int = 12, words: int = 64, examples: int = 4) -> tuple[TensorDataset, None]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randint(0, words, (examples, length), generator=generator)
    return TensorDataset(x, torch.zeros(examples)), None


def mean_square(output: object, target: Tensor) -> Tensor:
    """A loss in which every tensor that the model returns takes part."""
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    return torch.stack([leaf.square().mean() for leaf in leaves]).sum()


def nowhere(output: Tensor, target: Tensor) -> Tensor:
    """A loss that is not a number."""
    return output.sum() * torch.nan


def margin(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """A metric: by how much the best class is ahead, in sum, and of how many examples."""
    best = output.topk(2, -1).values
    return (best[:, 0] - best[:, 1]).sum(), len(target)


class Noisy(nn.Module):
    """A classifier with dropout and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = Layer(6), nn.BatchNorm1d(6)
        self.drop, self.c = nn.Dropout(0.2), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.drop(self.norm(self.a(x))))


class Judging(Noisy):
    """Returns its own loss, of an input that is the target."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(super().forward(x), target)


class Steep(nn.Module):
    """Chain, with an output so large that its float16 gradients overflow under a large scale."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Layer(6), Layer(6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x))) * 10.0


class _WithToken(nn.Module):
    """Two rows that are learned, after those of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.token = Layer(6), nn.Parameter(torch.ones(2, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.layer(x), self.token))


class Token(nn.Module):
    """The gradient of the token is a piece of the gradient of what the first part gives."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = _WithToken(), Layer(6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.c(self.a(x))
        return y[:-2] + y[-2:].sum(0)


def one_bad_example() -> tuple[TensorDataset, TensorDataset]:
    """`regression`, one of whose inputs is no number."""
    train, held_out = regression()
    x, y = (tensor.clone() for tensor in train.tensors)
    x[11, 2] = float("nan")
    return TensorDataset(x, y), held_out


def classes(examples: int = 80) -> tuple[TensorDataset, TensorDataset]:
    """Three classes that a linear layer can tell apart; a quarter is held out."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(examples, 6, generator=generator)
    whole = TensorDataset(x, x[:, :3].argmax(1))
    return TensorDataset(*whole[: examples * 3 // 4]), TensorDataset(*whole[examples * 3 // 4 :])


class Drawn(IterableDataset[Any]):
    """A stream that draws its examples, differently in each epoch; it has no end."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        while True:
            mean = random.random() + float(np.random.rand()) + self.epoch
            yield torch.randn(6) + mean, int(torch.randint(3, ()))


def drawn() -> tuple[Drawn, TensorDataset]:
    return Drawn(), classes()[1]


class Towers(nn.Module):
    """Two branches that run in turn and meet, and a mask that both halves of the model read."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Sequential(Layer(6), Layer(6)), nn.Sequential(Layer(6), Layer(6))
        self.top = Layer(6)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.arange(6, device=x.device) < 4
        left = self.left(torch.where(mask, x, 0.5 * x))
        right = self.right(x)
        return self.top(left + torch.where(mask, right, -right))


class Deadly(Dataset[Any]):
    """Kills the process of a rank when it reads its 100th example, unless it was started again; or
    stops it, and kills it some seconds later.
    """

    def __init__(self, dataset: TensorDataset, rank: int, seconds: float | None) -> None:
        self.dataset, self.rank, self.seconds, self.read = dataset, rank, seconds, 0

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        here = os.environ.get("RANK"), os.environ.get("TORCHELASTIC_RESTART_COUNT")
        if self.read == 100 and here == (str(self.rank), "0"):
            self._end()
        return self.dataset[index]

    def _end(self) -> None:
        if self.seconds is None:
            os.kill(os.getpid(), signal.SIGKILL)
        subprocess.Popen(["sh", "-c", f"sleep {self.seconds}; kill -KILL {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)


def deadly(
    rank: int = 1, real: bool = False, seconds: float | None = None
) -> tuple[Deadly, TensorDataset | None]:
    """`real`: `regression` in place of `classes`; `seconds`: stopped, and killed after so many."""
    train, held_out = regression() if real else classes()
    return Deadly(train, rank, seconds), held_out


class Idle(Noisy):
    """Noisy, with a layer that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = Layer(6)


class Averaging(nn.Module):
    """Subtracts from what it returns the running mean of what its first layer gives, and scales by
    what the mean was before; one buffer changes in a stretch without gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Layer(6), Layer(6), Layer(6)
        self.mean: Tensor
        self.count: Tensor
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x) * self.mean.exp()
        self.mean.mul_(0.9).add_(first.detach().mean(0), alpha=0.1)
        with torch.no_grad():
            self.count.mul_(0.5).add_(1)
        return self.c(self.b(first)) - self.mean * self.count


class Aside(Chain):
    """Chain, in which no gradient comes to the second layer."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        return self.c(first + self.b(first).detach())


class Waiting(Dataset[Any]):
    """Gives nothing before a file is there: a minute at most."""

    def __init__(self, dataset: TensorDataset, path: str) -> None:
        self.dataset, self.path = dataset, Path(path)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        deadline = time.monotonic() + 60
        while not self.path.exists():
            assert time.monotonic() < deadline, f"{self.path} has not come"
            time.sleep(0.02)
        return self.dataset[index]


def waiting(path: str) -> tuple[TensorDataset, Waiting]:
    """`classes`, whose held-out part waits."""
    train, held_out = classes()
    return train, Waiting(held_out, path)


def rising(step: int) -> float:
    """A factor of the learning rate, for LambdaLR: whole after eight steps."""
    return min(1.0, (step + 1) / 8)


def falling(step: float) -> float:
    """One for MultiplicativeLR and CyclicLR."""
    return 0.9 ** (step % 5)


def wordy(step: int) -> str:
    """None at all."""
    return f"{step}"


class Words(nn.Module):
    """An embedding whose gradients are sparse, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Embedding(64, 6, sparse=True), Layer(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x)).mean((1, 2))


class Filtered(nn.Module):
    """Learned complex filters between layers, and a complex table that turns like rotary ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.filters = nn.ParameterList(torch.randn(2, 4, dtype=torch.complex64).unbind())
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for each in self.filters:
            x = torch.tanh(torch.fft.irfft(torch.fft.rfft(x) * each, n=6))
        pairs = torch.view_as_complex(x.unflatten(-1, (3, 2)))
        return self.last(torch.view_as_real(pairs * self.turns).flatten(-2))
