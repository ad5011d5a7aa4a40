"""Complex numbers: tables, parameters, Fourier transforms."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.specimens import Inputs, sequences, specimen


class Layers(nn.Module):
    """Two linear layers, for what is done with complex numbers in between."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a(x)))

    def between(self, h: Tensor) -> Tensor:
        raise NotImplementedError


@specimen(sequences)
class Rotary(Layers):
    """A table of complex numbers turns pairs, as in Llama's first code."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(5.0), 10.0 ** -torch.arange(3.0))
        self.table = nn.Buffer(torch.polar(torch.ones_like(angles), angles))

    def between(self, h: Tensor) -> Tensor:
        pairs = torch.view_as_complex(h.unflatten(-1, (3, 2)).contiguous())
        return torch.view_as_real(pairs * self.table).flatten(-2)


@specimen(sequences)
class RotaryNotSaved(Rotary):
    def __init__(self) -> None:
        super().__init__()
        table = self.table.data
        del self.table
        self.register_buffer("table", table, persistent=False)


@specimen(sequences)
class RotaryPlain(Layers):
    """A table that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(5.0), 10.0 ** -torch.arange(3.0))
        self.table = torch.polar(torch.ones_like(angles), angles)

    def between(self, h: Tensor) -> Tensor:
        pairs = torch.view_as_complex(h.unflatten(-1, (3, 2)).contiguous())
        return torch.view_as_real(pairs * self.table).flatten(-2)


@specimen()
class ComplexWeight(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, dtype=torch.get_default_dtype().to_complex()))

    def between(self, h: Tensor) -> Tensor:
        turned = torch.complex(h[:, :3], h[:, 3:]) @ self.weight
        return torch.cat([turned.real, turned.imag], 1)


@specimen()
class ComplexLinear(nn.Module):
    """A layer of complex weights, given complex numbers; the model returns such ones."""

    def __init__(self) -> None:
        super().__init__()
        wide = torch.get_default_dtype().to_complex()
        self.a, self.b = nn.Linear(6, 4, dtype=wide), nn.Linear(4, 2, dtype=wide)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x.to(self.a.weight.dtype))
        return self.b(h * torch.sigmoid(h.abs()))


@specimen()
class ComplexCrosses(nn.Module):
    """What goes from stage to stage is complex; the end is real."""

    def __init__(self) -> None:
        super().__init__()
        wide = torch.get_default_dtype().to_complex()
        self.a, self.b, self.c = (nn.Linear(6, 6, dtype=wide) for _ in range(3))
        self.out = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.c(self.b(self.a(torch.complex(x, x.flip(1)))))
        return self.out(h.abs())


def _complex(examples: int) -> Inputs:
    return (torch.randn(examples, 6, dtype=torch.get_default_dtype().to_complex()),), {}


@specimen(_complex)
class ComplexInput(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x.real) * self.a(x.imag))


@specimen(sequences)
class Fourier(Layers):
    """Mixing of tokens as in FNet."""

    def between(self, h: Tensor) -> Tensor:
        return torch.fft.fft2(h).real + h


@specimen(sequences)
class SpectralFilter(Layers):
    """A learned filter between rfft and irfft, as in GFNet."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(3, 6, 2))

    def between(self, h: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(h, dim=1) * torch.view_as_complex(self.filter)
        return torch.fft.irfft(spectrum, n=5, dim=1)


@specimen(sequences)
class SpectralFilterComplex(Layers):
    """As before with a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        wide = torch.get_default_dtype().to_complex()
        self.filter = nn.Parameter(torch.randn(3, 6, dtype=wide))

    def between(self, h: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(h, dim=1) * self.filter, n=5, dim=1)


@specimen()
class StateSpace(Layers):
    """A diagonal recurrence with complex poles, as in S4D."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.turn = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))

    def between(self, h: Tensor) -> Tensor:
        pole = torch.exp(torch.complex(-self.decay.exp(), self.turn))
        powers = pole ** torch.arange(6)[:, None]
        return h @ (powers * pole.conj()).real @ torch.ones(3, 6, dtype=h.dtype)


@specimen()
class PolarAndBack(Layers):
    def between(self, h: Tensor) -> Tensor:
        whole = torch.polar(h[:, :3].exp(), h[:, 3:])
        return torch.cat([whole.abs().log(), whole.angle()], 1)


@specimen()
class Conjugated(Layers):
    """conj() is a view that says so in a bit; .mH, .real and .imag are views, too."""

    def between(self, h: Tensor) -> Tensor:
        whole = torch.complex(h[:, :3], h[:, 3:])
        gram = whole.mH @ whole
        return torch.cat([(whole.conj() @ gram).real, (whole @ gram.conj()).imag], 1)


@specimen()
class ComplexBufferWritten(Layers):
    def __init__(self) -> None:
        super().__init__()
        wide = torch.get_default_dtype().to_complex()
        self.phase = nn.Buffer(torch.ones(3, dtype=wide))

    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.phase.mul_(
                torch.polar(torch.ones(3, dtype=h.dtype), torch.arange(3.0).to(h.dtype))
            )
        whole = torch.complex(h[:, :3], h[:, 3:]) * self.phase
        return torch.view_as_real(whole).flatten(1)


@specimen(sequences)
class Stft(Layers):
    """A spectrogram of each example."""

    def __init__(self) -> None:
        super().__init__()
        self.window = nn.Buffer(torch.hann_window(8))

    def between(self, h: Tensor) -> Tensor:
        signal = h.flatten(1)
        bins = torch.stft(signal, 8, 4, window=self.window, return_complex=True)
        return bins.abs().square().mean(-1)[:, None, :5].transpose(1, 2) * h
