"""What a captured model depends on besides its inputs: once it changes, the model is captured anew.

A capture has fixed which modules are in training mode, which parameters learn, and what Python code
made of the attributes of modules. It reads the very tensors that the model had.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS = (list, tuple, set, frozenset)
_MODULES_OWN = frozenset(vars(nn.Module())) - {"training"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class ModelState:
    """Equal to that of another time if nothing has changed in between. `items`: what there is, each
    under its name; `kept` are the objects that were compared by identity, lest it be reused.
    """

    items: tuple[tuple[str, Any], ...]
    kept: tuple[Any, ...] = field(compare=False)

    @staticmethod
    def of(model: nn.Module) -> ModelState:
        look = _Look()
        items = tuple(item for path, module in model.named_modules() for item in look(path, module))
        return ModelState(items, tuple(look.kept.values()))


class _Look:
    def __init__(self) -> None:
        self.kept: dict[int, Any] = {}
        self.known: dict[int, Any] = {}

    def __call__(self, path: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
        """What a capture depends on in one module, apart from those inside it."""
        hooks = (hook for name in _HOOKS for hook in vars(module)[name].values())
        known = tuple(self._identity(hook) for hook in hooks)
        yield path, (self._identity(module), type(module), known)
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            yield f"{path}.{name}", self._tensor(tensor)
        for name, value in vars(module).items():
            if name not in _MODULES_OWN:
                yield f"{path}.{name}", self._value(value)

    def _identity(self, thing: Any) -> int:
        self.kept[id(thing)] = thing
        return id(thing)

    def _tensor(self, tensor: Tensor | None) -> Any:
        if tensor is None:
            return None
        hooked = tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None)
        kind = (tuple(tensor.shape), tensor.dtype, tensor.requires_grad, bool(hooked))
        return self._identity(tensor), *kind

    def _value(self, value: Any) -> Any:
        """Returns a plain value as it is, with its type: 1 is equal to True; containers by what is
        in them, as torch.export puts copies in their places; everything else by its identity, and
        objects that have nothing but data also by these.
        """
        if isinstance(value, _PLAIN):
            return type(value), value if value == value else "nan"
        if id(value) in self.known:
            return self.known[id(value)]
        if isinstance(value, Tensor):  # a constant of the capture
            return *self._tensor(value), None if value.is_inference() else value._version
        identity = self._identity(value)
        self.known[id(value)] = identity  # it may contain itself
        kind = type(value) if isinstance(value, (dict, *_CONTAINERS)) else identity
        self.known[id(value)] = state = (kind, self._content(value))
        return state

    def _content(self, value: Any) -> Any:
        if isinstance(value, dict):
            return tuple((str(key), self._value(each)) for key, each in value.items())
        if isinstance(value, (set, frozenset)):
            return frozenset(self._value(each) for each in value)
        if isinstance(value, _CONTAINERS):
            return tuple(self._value(each) for each in value)
        if isinstance(value, nn.Module) or not hasattr(value, "__dict__"):
            return None
        attributes = vars(value)
        if not all(isinstance(each, (*_PLAIN, *_CONTAINERS, dict)) for each in attributes.values()):
            return None  # no record of settings
        return tuple((name, self._value(each)) for name, each in attributes.items())
