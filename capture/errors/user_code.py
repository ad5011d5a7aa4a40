"""Imports and calls the user's code, `package.module:name`; its errors name file and line."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch

from pipedream.graph.errors import UserError

_T = TypeVar("_T")

_LONGEST = 300
"""Characters of a message: those of torch can list every signature of a function."""

_TORCHVISION_MISMATCH = "torchvision::nms does not exist"
"""In the error of a torchvision that was built for another torch."""

_fragment: torch.library.Library | None = None  # its declarations end when it is collected


def load_function(source: str, directory: Path | None = None) -> Callable[..., Any]:
    """Imports the callable `package.module:name`.

    Searches `directory` (the folder of a run config), then the current directory, then Python's
    path. Raises UserError.
    """
    module_name, _, name = source.partition(":")
    if not module_name or not name:
        raise UserError(f"{source!r} names no function: write package.module:name")
    module = _import(module_name, source, directory)
    function: Any = module
    for part in name.split("."):
        if not hasattr(function, part):
            file = getattr(module, "__file__", None) or "built in"
            raise UserError(
                f"{source}: {module_name} ({file}) has no {name!r}"
                + close_matches(name, (key for key in vars(module) if not key.startswith("_")))
            )
        function = getattr(function, part)
    if not callable(function):
        raise UserError(f"{source}: this is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


def call(source: str, function: Callable[..., Any], args: Mapping[str, Any]) -> Any:
    """Calls `function(**args)`; any error becomes a UserError with the user's file and line."""
    check_call(source, function, (), args)
    with blaming(source):
        return _beside_torchvision(lambda: function(**args))


def check_call(
    source: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Raises UserError with the signature of `function` if it does not take these arguments."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise UserError(f"{source}: {error}: its signature is {_signature(function)}") from error
    except ValueError:
        pass  # a built-in without a signature


@contextmanager
def blaming(source: str) -> Iterator[None]:
    """Turns any error of the user's code inside, and sys.exit, into a UserError: see `blame`."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{source}: {blame(error)}") from error


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Whether `function` has a parameter called `name`."""
    try:
        return name in inspect.signature(function).parameters
    except ValueError:
        return False


def blame(error: BaseException) -> str:
    """Returns `FILE:LINE: TypeError: message (OSError: its cause)`, LINE being the user's last."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    *_, first = _causes(error)
    line = _in_one_line(error)
    why = f" ({_in_one_line(first)})" if first is not error and str(first) not in line else ""
    return f"{place(error)}{line}{why}"


def _in_one_line(error: BaseException) -> str:
    """`TypeError: message`, not too long."""
    message = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {message[:_LONGEST]}{'...' * (len(message) > _LONGEST)}"


def place(error: BaseException) -> str:
    """`FILE:LINE: ` of the last of the user's own lines in the traceback, or empty."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if is_the_users(frame.filename)]
    return f"{theirs[-1].filename}:{theirs[-1].lineno}: " if theirs else ""


def close_matches(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'resnet50', 'resnet152'?`, or empty if no name is close."""
    names = sorted(set(known))
    begins = [other for other in names if len(other) > 2 and name.startswith(other)]
    close = [*difflib.get_close_matches(name, names, n=3), *sorted(begins, key=len)[-2:]]
    shown = ", ".join(repr(other) for other in dict.fromkeys(close))
    return f"; did you mean {shown}?" if shown else ""


def _import(name: str, source: str, directory: Path | None) -> ModuleType:
    for place in (Path.cwd(), directory):
        if place is not None and str(place.resolve()) not in sys.path:
            sys.path.insert(0, str(place.resolve()))
    with blaming(source):
        try:
            return _beside_torchvision(lambda: importlib.import_module(name))
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            where = f"{directory}, " if directory is not None else ""
            raise UserError(
                f"{source}: there is no module {error.name} in {where}the current directory "
                "or on PYTHONPATH"
            ) from error


def _beside_torchvision(do: Callable[[], _T]) -> _T:
    """Imports, or calls what may import, even if a torchvision was built for another torch."""
    try:
        return do()
    except Exception as error:
        if not any(_TORCHVISION_MISMATCH in str(each) for each in _causes(error)):
            raise
    import_torchvision()
    return do()


def import_torchvision() -> ModuleType:
    """Imports torchvision, even if its compiled operators do not match the installed torch.

    Wheels for another build of torch (CUDA or CPU) fail at import when they register shapes for
    `nms`, an operator of detection models, which are not supported here. Declaring the two missing
    operators without an implementation lets the import succeed. Raises UserError if torchvision is
    not installed.
    """
    global _fragment
    try:
        return importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        raise UserError("torchvision is not installed: pip install 'pipedream[models]'") from error
    except RuntimeError as error:
        if _TORCHVISION_MISMATCH not in str(error) or _fragment is not None:
            raise
    _fragment = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        schema = f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        _fragment.define(schema)  # type: ignore[no-untyped-call]
    return importlib.import_module("torchvision")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from, and so on."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _signature(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", "function")
    parameters = inspect.signature(function).parameters.values()
    return f"{name}({', '.join(str(p).partition(':')[0].partition('=')[0] for p in parameters)})"


@cache
def is_the_users(file: str) -> bool:
    """Whether a file belongs to neither Python nor an installed package.

    Packages of an environment that this one builds on count as installed.
    """
    paths = sysconfig.get_paths()
    libraries = (paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib"))
    installed = {"site-packages", "dist-packages"} & set(Path(file).parts)
    return not installed and not file.startswith((*libraries, *package_folders(), "<"))


def package_folders() -> tuple[str, ...]:
    """The folders of this package, but not their parent, which may hold files of a user."""
    folders = (
        "graph",
        "sharding",
        "capture",
        "schedule",
        "comm",
        "profiler",
        "optimizer",
        "runtime",
    )
    parent = Path(__file__).parents[2]
    return tuple(f"{parent / name}{os.sep}" for name in folders)
