"""Recurrent layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from zoo.specimens import Inputs, add, specimen


def steps(examples: int) -> Inputs:
    """Three of six numbers."""
    return (torch.randn(examples, 3, 6),), {}


class Steps(nn.Module):
    """What a recurrent layer gives for each step, between two linear layers."""

    def __init__(self, recurrent: nn.Module, width: int) -> None:
        super().__init__()
        self.before, self.recurrent = nn.Linear(6, 6), recurrent
        self.after = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.recurrent(torch.tanh(self.before(x)))
        return self.after(out)


LAYERS: dict[str, tuple[Any, int]] = {
    "rnn tanh": (lambda: nn.RNN(6, 4, batch_first=True), 4),
    "rnn relu": (lambda: nn.RNN(6, 4, nonlinearity="relu", batch_first=True), 4),
    "rnn of two layers": (lambda: nn.RNN(6, 4, 2, batch_first=True), 4),
    "gru": (lambda: nn.GRU(6, 4, batch_first=True), 4),
    "gru of two layers": (lambda: nn.GRU(6, 4, 2, batch_first=True), 4),
    "gru both ways": (lambda: nn.GRU(6, 4, batch_first=True, bidirectional=True), 8),
    "gru without bias": (lambda: nn.GRU(6, 4, bias=False, batch_first=True), 4),
    "lstm": (lambda: nn.LSTM(6, 4, batch_first=True), 4),
    "lstm of two layers both ways": (
        lambda: nn.LSTM(6, 4, 2, batch_first=True, bidirectional=True),
        8,
    ),
    "lstm with projection": (lambda: nn.LSTM(6, 4, proj_size=3, batch_first=True), 3),
    "lstm, time first": (lambda: nn.LSTM(6, 4), 4),
    "gru, time first": (lambda: nn.GRU(6, 4), 4),
}


def _layer(name: str) -> nn.Module:
    make, width = LAYERS[name]
    return Steps(make(), width)


for _name in LAYERS:
    add(_name, lambda name=_name: _layer(name), steps, kind="recurrent")  # type: ignore[misc]


@specimen(steps)
class LastState(nn.Module):
    """Only the last state of a GRU is used."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.out = nn.GRU(6, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        _, last = self.gru(x)
        return self.out(last[-1])


@specimen(steps)
class CellState(nn.Module):
    """All three that an LSTM gives."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(6, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        steps, (state, cell) = self.lstm(x)
        return self.out(steps.mean(1) + state[0] * cell[0])


def _with_state(examples: int) -> Inputs:
    return (torch.randn(examples, 3, 6), torch.randn(examples, 4)), {}


@specimen(_with_state)
class StateGiven(nn.Module):
    """The state to begin with is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.out = nn.GRU(6, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        steps, last = self.gru(x, state[None])
        return self.out(steps + last[0][:, None])


@specimen(steps)
class StateLearned(nn.Module):
    """The state to begin with is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.state = nn.Parameter(torch.randn(2, 1, 4))
        self.lstm, self.out = nn.LSTM(6, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        begin = self.state.expand(-1, len(x), -1).contiguous()
        steps, _ = self.lstm(x, (begin[:1], begin[1:]))
        return self.out(steps)


class Cells(nn.Module):
    """A cell, step by step."""

    def __init__(self, cell: nn.Module, pair: bool = False) -> None:
        super().__init__()
        self.cell, self.pair, self.out = cell, pair, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = torch.zeros(len(x), 4, dtype=x.dtype)
        state = (state, state) if self.pair else state
        steps = []
        for step in x.unbind(1):
            state = self.cell(step, state)
            steps.append(state[0] if self.pair else state)
        return self.out(torch.stack(steps, 1))


add("rnn cells", lambda: Cells(nn.RNNCell(6, 4)), steps, kind="recurrent")
add(
    "rnn cells relu",
    lambda: Cells(nn.RNNCell(6, 4, nonlinearity="relu")),
    steps,
    kind="recurrent",
)
add("gru cells", lambda: Cells(nn.GRUCell(6, 4)), steps, kind="recurrent")
add("lstm cells", lambda: Cells(nn.LSTMCell(6, 4), pair=True), steps, kind="recurrent")


@specimen(steps)
class StepsWritten(nn.Module):
    """Each step is written into what has room for all."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(6, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        steps = x.new_zeros(len(x), 3, 4)
        state = x.new_zeros(len(x), 4)
        for number in range(3):
            state = self.cell(x[:, number], state)
            steps[:, number] = state
        return self.out(steps)


def _packed(examples: int) -> Inputs:
    lengths = torch.tensor([3, 3, 2, 1][:examples])
    return (torch.randn(examples, 3, 6), lengths), {}


@specimen(_packed, refused="cannot be captured")
class Packed(nn.Module):
    """Sequences of several lengths: how many rows a step has depends on them."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(6, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True)
        steps, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.out(steps)


@specimen(steps)
class BackwardInTime(nn.Module):
    """A GRU over the steps in reverse, put in order again."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.out = nn.GRU(6, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        steps, _ = self.gru(x.flip(1))
        return self.out(steps.flip(1))


@specimen(steps)
class EncoderDecoder(nn.Module):
    """The last state of one GRU begins another."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.GRU(6, 4, batch_first=True), nn.GRU(6, 4, batch_first=True)
        self.out = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        _, state = self.encoder(x)
        steps, _ = self.decoder(x, state)
        return self.out(steps)


@specimen(steps)
class SameTwice(nn.Module):
    """One GRU reads what it has given."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(6, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        steps, state = self.gru(x)
        again, _ = self.gru(steps, state)
        return again


@specimen(steps, random=True)
class Dropping(nn.Module):
    """Dropout between two layers of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(6, 4, 2, dropout=0.3, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0])
