"""Makes torch.export record what it would leave out of a graph, or refuse it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class Recording(TorchFunctionMode):
    """Context of an export.

    `contiguous()` of what lies so already is no operator for torch. For a minibatch of one example
    that is so more often: then it is one if `as_in`, the export for two examples, has one there.
    `torch.no_grad()` inside of `torch.autocast()` would be overlooked: an error in training.
    """

    def __init__(self, model: nn.Module, as_in: Recording | None = None) -> None:
        super().__init__()
        self.model, self.as_in = model, as_in
        self.contiguous: list[bool] = []
        self.doubtful = False
        self.autocast = _autocast()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func is Tensor.contiguous and self._is_operator(*args, **named):
            return torch.ops.aten.contiguous.default(*args, **named)
        if func is torch._C._set_grad_enabled and self.model.training:
            self._check_autocast()
        return func(*args, **named)

    def _check_autocast(self) -> None:
        if _autocast() != self.autocast:
            raise RuntimeError(
                "torch.no_grad() inside of torch.autocast() would be overlooked; put the autocast "
                "inside of the no_grad, or use detach()"
            )

    @contextmanager
    def watching_buffers(self) -> Iterator[None]:
        """Makes it an error, within, if a module below the model puts another buffer in the place
        of one: torch.export would leave the old one.
        """

        def buffers() -> dict[tuple[int, str], Tensor]:
            parts = [part for part in self.model.modules() if part is not self.model]
            return {(id(p), name): b for p in parts for name, b in p.named_buffers(recurse=False)}

        def begin(*_: object) -> None:
            before.update(buffers())

        def end(*_: object) -> None:
            for (part, name), buffer in buffers().items():
                if before.get((part, name), buffer) is not buffer:
                    raise RuntimeError(
                        f"the buffer {name} is replaced by another tensor, which would be lost; "
                        f"write into it: self.{name}.copy_(...)"
                    )

        before: dict[tuple[int, str], Tensor] = {}
        model = self.model
        with model.register_forward_pre_hook(begin), model.register_forward_hook(end):
            yield

    def _is_operator(
        self, tensor: Tensor, memory_format: torch.memory_format = torch.contiguous_format
    ) -> bool:
        already, number = tensor.is_contiguous(memory_format=memory_format), len(self.contiguous)
        known = self.as_in.contiguous if self.as_in is not None else []
        self.doubtful |= already and 1 in tensor.shape
        self.contiguous.append(not already or (number < len(known) and known[number]))
        return self.contiguous[-1]


def _autocast() -> tuple[object, ...]:
    """Returns the autocast settings in force."""
    kinds = ("cpu", "cuda")
    return tuple(
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds
    )
