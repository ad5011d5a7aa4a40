"""Checks that a model computes the same for every minibatch, as a captured model will.

torch.export runs a model once. What Python code decides in that run, by its random numbers or by
state that an earlier call left behind, is frozen into the capture.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.export import ExportedProgram

from pipedream.capture.errors.capture_errors import cannot_capture
from pipedream.capture.errors.user_code import is_the_users
from pipedream.graph.errors import UserError

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, dict, set)
_ABSENT = object()
_MODULES_OWN = frozenset(vars(nn.Module())) - {"training"}


def export_deterministic(
    model: nn.Module,
    export: Callable[[], ExportedProgram],
    call: Callable[[], object],
    again: bool = True,
) -> ExportedProgram:
    """Returns what `export` returns for `model`, and restores the attributes of the model.

    `call` calls the model and serves to find the line to blame. `again`: exports a second time if
    attributes have changed. Raises UserError if another call of the model may compute something
    else.
    """
    names = {name for name, _ in model.named_parameters()}
    randoms = {name: probe() for name, probe in _RANDOM.items()}
    with _watching(model) as changes:
        program = export()
    for name, probe in _RANDOM.items():
        if probe() != randoms[name]:
            reason = (
                f"it draws from {name}, whose numbers would be the same for every minibatch; draw "
                "from torch and choose with torch.where, or turn this off"
            )
            raise cannot_capture(model, reason, _line_that_changes(probe, call))
    if created := sorted({name for name, _ in model.named_parameters()} - names):
        raise cannot_capture(
            model, f"it creates {created[0]} as it runs; create all parameters in __init__"
        )
    if again and changes and not _same_again(changes, program, export):
        first = changes[0][0]
        reason = (
            f"{first.name} changes as it runs and changes what it computes; make it a buffer, a "
            "tensor that is written in place"
        )
        raise cannot_capture(model, reason, _line_that_changes(first.now, call))
    return program


@contextmanager
def _watching(model: nn.Module) -> Iterator[list[tuple[_Attribute, _Attribute]]]:
    """Lists the attributes that calls of the model inside this context change: (before, after).

    They are compared as each call ends, because torch.export restores most of them.
    """
    before = _attributes(model)
    changes: list[tuple[_Attribute, _Attribute]] = []

    def look(*_: object) -> None:
        after = _attributes(model)
        for place in {**before, **after}:
            old = before.get(place) or replace(after[place], value=_ABSENT, items=None)
            new = after.get(place) or replace(old, value=_ABSENT, items=None)
            if not _same(old.value, new.value) or not _same_items(old.items, new.items):
                changes.append((old, new))

    try:
        with model.register_forward_hook(look):
            yield changes
    finally:
        for old, _ in changes:
            old.restore()


def _same_again(
    changes: list[tuple[_Attribute, _Attribute]],
    program: ExportedProgram,
    export: Callable[[], ExportedProgram],
) -> bool:
    """Tells whether the state that a call left behind does not change the next export, nor is a
    tensor that the program reads: each call would read another one.
    """
    read = {id(constant) for constant in program.constants.values()}
    if any(read & _tensors(old) for old, _ in changes):
        return False
    for _, new in changes:
        new.restore()
    try:
        return _text(export()) == _text(program)
    except UserError:
        return False
    finally:
        for old, _ in changes:
            old.restore()


def _tensors(attribute: _Attribute) -> set[int]:
    """Returns the identities of the tensors that it was, or had in its list or dict."""
    items = attribute.items.values() if isinstance(attribute.items, dict) else attribute.items
    return {id(each) for each in (attribute.value, *(items or ())) if isinstance(each, Tensor)}


def _text(program: ExportedProgram) -> str:
    return re.sub(r"\.call\d+", "", program.graph_module.code)


_RANDOM: dict[str, Callable[[], object]] = {
    "Python's random": random.getstate,
    "numpy.random": lambda: repr(np.random.get_state(legacy=False)),
}


@dataclass(frozen=True)
class _Attribute:
    """The value of a Python attribute of a module, with the items of a list, dict or set."""

    module: nn.Module
    key: str
    name: str
    value: Any
    items: Any

    def restore(self) -> None:
        """Restores the attribute."""
        if type(self.value) is list:
            self.value[:] = self.items
        elif type(self.value) in (dict, set):
            self.value.clear()
            self.value.update(self.items)
        vars(self.module)[self.key] = self.value
        if self.value is _ABSENT:
            del vars(self.module)[self.key]

    def now(self) -> object:
        """Returns a key that tells its values apart."""
        value = vars(self.module).get(self.key, _ABSENT)
        return value if isinstance(value, _PLAIN) else (id(value), repr(_ids(value)))


def _attributes(model: nn.Module) -> dict[tuple[nn.Module, str], _Attribute]:
    return {
        (module, key): _Attribute(
            module, key, f"{path}.{key}" if path else key, value, _items(value)
        )
        for path, module in model.named_modules()
        for key, value in vars(module).items()
        if key not in _MODULES_OWN
    }


def _ids(value: Any) -> Any:
    """Returns the identities of the objects in a list, dict or set."""
    items = value.values() if type(value) is dict else _items(value) or ()
    return [each if isinstance(each, _PLAIN) else id(each) for each in items]


def _items(value: Any) -> Any:
    return type(value)(value) if type(value) in _CONTAINERS else None


def _same(one: Any, other: Any) -> bool:
    return one is other or (
        isinstance(one, _PLAIN) and type(one) is type(other) and bool(one == other)
    )


def _same_items(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return one is None or bool(one == other)


def _line_that_changes(probe: Callable[[], object], call: Callable[[], object]) -> str:
    """Returns `FILE:LINE: ` of the user's line in which `probe()` changes in `call()`, or empty."""
    before, last, changed_at = probe(), "", ""

    def look(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal last, changed_at
        if not changed_at and last and probe() != before:
            changed_at = last
        last = f"{frame.f_code.co_filename}:{frame.f_lineno}: "
        return look

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        if changed_at or not is_the_users(frame.f_code.co_filename):
            return None
        return look(frame, event, argument)

    tracing = sys.gettrace()
    sys.settrace(enter)
    try:
        call()
    except Exception:  # the capture fails anyway
        pass
    finally:
        sys.settrace(tracing)
    return changed_at
