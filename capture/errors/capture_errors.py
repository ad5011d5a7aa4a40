"""One-line errors for models that cannot be captured: where, why, and what to do."""

from __future__ import annotations

import inspect
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn
from torch.nn.parameter import UninitializedParameter
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from pipedream.capture.errors.user_code import blame, blaming, is_the_users, package_folders, place
from pipedream.graph.errors import UserError

DATA_DEPENDENT = (
    "its control flow, a number or a shape depends on the data; use torch.where or masks of fixed "
    "shape, or move this part out of the model"
)

_LONGEST_REPR = 100
"""Characters of what a layer says of itself."""

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)  # numbers that depend on the data

_FUNCTORCH = "it uses torch.func or vmap; write the batched operators instead"
_SPARSE = (
    "it computes with sparse tensors, which torch.export cannot trace; use dense ones, or "
    "index_add and scatter"
)
_GENERATOR = (
    "it draws from a torch.Generator of its own, which no checkpoint has; draw from torch's, "
    "leaving generator= out"
)

# Errors of torch, matched by "CLASS: MESSAGE", and what they mean to the user.
_KNOWN = (
    (r"^GuardOnDataDependentSymNode|^DynamicOutputShape|^DataDependentOutput|^PendingUnbacked",
     DATA_DEPENDENT),
    (r"\.numpy\(\) is not supported", "it converts a tensor to numpy, which loses the graph and "
     "the gradient; use torch's functions"),
    (r"FakeTensor.__format__", "it formats the value of a tensor, which is unknown during the "
     "capture; leave the print or log out of forward"),
    (r"nested_?tensor|is not tracked with proxy", "nested tensors have no fixed shape; pad to a "
     "fixed length and use a mask"),
    (r"fake tensor in the exported program constant's list", "it writes to a tensor's .data, or "
     "does something else that torch.export cannot trace; write it as operators on tensors"),
    (r"not linked with support for cuda|Found no NVIDIA driver|Torch not compiled with CUDA"
     r"|FakeTensorDeviceMismatch",
     "it moves a tensor to a GPU, and there is none; write .to(x.device), x being an input"),
    (r"missing the required \"forward\" function", "it has no forward: return a module that has "
     "one, such as nn.Sequential"),
    (r"_add_batch_dim|functorch", _FUNCTORCH),
    (r"Cannot access data pointer|erroneously tracing into a custom kernel|Can't pickle"
     r"|_share_fd_|Not available for 'meta' device", "it copies or saves tensors, makes one of the "
     "values of others (torch.tensor([...]): write torch.stack), or calls an extension, and "
     "tensors have no data during the capture; register an extension with torch.library.custom_op "
     "and a fake implementation"),
    (r"_sparse_|[Ss]parse\w*(CPU|CUDA|Meta)\b|[Ss]parse tensor", _SPARSE),
    (r"UnsupportedOperatorException|NotImplementedError: (aten|\w+)::", "torch.export cannot "
     "trace this operator; use others, or register it with torch.library.custom_op"),
    (r"SymInt|SymBool|SymFloat", DATA_DEPENDENT),
)  # fmt: skip


_OPAQUE = (
    "an object that torch cannot take apart into tensors; return tensors, or tuples, lists or "
    "dicts of them, or register its class with torch.export.register_dataclass"
)
_CACHE = (
    "a cache of keys and values for generation, which training does not need; turn it off: "
    "model.config.use_cache = False, or pass use_cache=False"
)


_TAKEN = frozenset({*dir(fx.GraphModule), "meta"}) - {*dir(nn.Module)}
"""Attributes of a captured model, which a parameter or a module of these names would replace."""


def capture_error(error: BaseException, model: nn.Module, where: str = "") -> UserError:
    """Returns the UserError for an error of `model` during the capture, or at `where`."""
    known = f"{type(error).__name__}: {error}"
    reason = next((means for sign, means in _KNOWN if re.search(sign, known)), None)
    if isinstance(error, UserError):
        reason = error.message
    elif _passed(error, "torch/distributed/"):
        reason = (
            "it calls torch.distributed; leave communication to pd-train, which adds it between "
            "stages and replicas"
        )
    elif _passed(error, "torch/distributions/"):
        reason = (
            "torch.distributions looks at the values it is given, which are unknown during the "
            "capture; pass validate_args=False"
        )
    elif reason is None:
        reason = blame(error).removeprefix(place(error)) + failing_module(error, model)
    return cannot_capture(model, reason, place(error) or where or _place_in_library(error))


def _passed(error: BaseException, folder: str) -> bool:
    """Tells whether the error came through code of this folder."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(folder in frame.filename for frame in frames)


def failing_module(error: BaseException, model: nn.Module) -> str:
    """Returns `; in layer.3: Linear(in_features=4, out_features=4, bias=True), given [2, 5]` for
    the innermost module of `model` whose call raised the error, or empty.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    place = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        known = frame.f_locals
        module = known.get("self")
        if frame.f_code.co_name != "_call_impl" or not isinstance(module, nn.Module):
            continue
        if id(module) not in paths:
            continue
        path, shown = paths[id(module)], " ".join(module.extra_repr().split())
        inputs = pytree.tree_leaves((known.get("args"), known.get("kwargs")))
        shapes = ", ".join(_kind(each) for each in inputs if isinstance(each, torch.Tensor))
        layer = f"{type(module).__name__}({shown[:_LONGEST_REPR]})" if path else "the model itself"
        place = f"; in {path + ': ' if path else ''}{layer}" + f", given {shapes}" * bool(shapes)
    return place


def _kind(tensor: torch.Tensor) -> str:
    """Returns `[2, 5]`, with the type if that is not the usual one."""
    usual = tensor.dtype == torch.get_default_dtype()
    return f"{list(tensor.shape)}" + f" of {str(tensor.dtype)[6:]}" * (not usual)


@contextmanager
def blaming_modules(source: str, model: nn.Module) -> Iterator[None]:
    """Turns any error of a call of `model` inside into a UserError that names the module."""
    try:
        with blaming(source):
            yield
    except UserError as error:
        named_module = failing_module(error.__cause__, model) if error.__cause__ else ""
        raise UserError(error.message + named_module) from error


def cannot_capture(model: nn.Module, reason: str, where: str = "") -> UserError:
    """Returns the UserError; `where` is `FILE:LINE: `, by default of the user's forward."""
    name = type(model).__name__
    return UserError(f"{where or _forward(model)}{name} cannot be captured: {reason}")


def place_of(node: fx.Node) -> str:
    """Returns `FILE:LINE: ` of the code that called an operator of an exported graph, or empty."""
    parts = (each for each in node.all_input_nodes if each.op == "get_attr")
    regions = (getattr(node.graph.owning_module, str(part.target), None) for part in parts)
    inside = [
        each
        for region in regions
        if isinstance(region, fx.GraphModule)  # such as torch.no_grad
        for each in region.graph.nodes
    ]
    traces = [each.meta.get("stack_trace") or "" for each in (*inside, node)]
    files = re.findall(r'File "(.+)", line (\d+)', "\n".join(traces))
    theirs = [each for each in files if is_the_users(each[0])] or files
    return "{}:{}: ".format(*theirs[-1]) if theirs else ""


@contextmanager
def noting_lines() -> Iterator[None]:
    """Has operators exported inside know all lines of the user's that led to them: torch keeps only
    those of functions called `forward`, after it has looked up a hundred others.
    """

    def ours(_tracer: object, frames: traceback.StackSummary) -> traceback.StackSummary:
        shown = (each for each in frames if _is_shown(each.name, each.filename))
        return traceback.StackSummary.from_list(shown)

    filter_name = "_filter_traceback_frames"  # older versions of torch lack it
    with (
        patch.object(fx.proxy, "CapturedTraceback", _ShownLines, create=True),
        patch.object(fx.proxy.TracerBase, filter_name, ours, create=True),
    ):
        yield


def _is_shown(function: str, file: str) -> bool:
    return function == "forward" or is_the_users(file)


class _ShownLines:
    """In the place of torch's `CapturedTraceback`: looks up no line but those shown."""

    def __init__(self, frame: FrameType) -> None:
        self.frame = frame

    @staticmethod
    def extract(**_: object) -> _ShownLines:
        return _ShownLines(sys._getframe(1))

    def summary(self) -> traceback.StackSummary:
        """Returns the frames from the outermost to that of the operator."""
        shown = [
            traceback.FrameSummary(frame.f_code.co_filename, line, frame.f_code.co_name)
            for frame, line in traceback.walk_stack(self.frame)
            if _is_shown(frame.f_code.co_name, frame.f_code.co_filename)
        ]
        return traceback.StackSummary.from_list(reversed(shown))


class FirstUseOfData(TorchFunctionMode):
    """Raises UserError, whose traceback has the line, where `.data` of a tensor is first used."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.data.__get__, torch.Tensor.data.__set__):  # type: ignore[attr-defined]
            raise UserError(".data is used")
        return func(*args, **(kwargs or {}))


def check_operators(module: fx.GraphModule, model: nn.Module) -> None:
    """Raises UserError if a shape, or a number taken from a tensor, depends on the data, or if an
    operator would not run as it did.
    """
    for node in module.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            shape = value.shape if isinstance(value, torch.Tensor) else [value]
            if any(isinstance(size, SYMBOLIC) for size in shape):
                raise cannot_capture(model, DATA_DEPENDENT, place_of(node))
            if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
                raise cannot_capture(model, _SPARSE, place_of(node))
        if isinstance(node.kwargs.get("generator"), fx.Node):
            raise cannot_capture(model, _GENERATOR, place_of(node))
        if getattr(node.target, "__module__", "").startswith("torch._functorch"):
            raise cannot_capture(model, _FUNCTORCH, place_of(node))


def check_model(model: nn.Module) -> None:
    """Raises UserError where torch.export would fail without a clear error, or drop code."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise cannot_capture(
                model,
                f"{_called(path)} is a ScriptModule, whose code is not Python; use the module it "
                "was compiled from",
            )
        if module._backward_hooks or module._backward_pre_hooks:
            raise cannot_capture(model, _hooked(_called(path)))
    names = (*model._parameters, *model._buffers, *model._modules)
    for name in sorted(_TAKEN.intersection(names)):
        raise cannot_capture(model, f"its {name} has a name that torch.fx needs itself: rename it")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise cannot_capture(
                model, f"{name} has no shape yet; call the model once on an example in its factory"
            )
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise cannot_capture(model, _hooked(name))


def check_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises UserError if an input is neither a tensor nor a plain value."""
    for keys, leaf in pytree.tree_leaves_with_path((args, kwargs)):
        if not isinstance(leaf, (torch.Tensor, bool, int, float, complex, str, type(None))):
            where = f"input {pytree.keystr(keys[1:])}"
            kind = type(leaf).__name__
            raise cannot_capture(
                model, f"{where} is a {kind}: give tensors, or tuples and dicts of them"
            )


def check_output(model: nn.Module, args: object, output: object) -> None:
    """Makes a forward hook that raises UserError if an output is neither a tensor nor a plain
    value.

    torch.export would fail, but with another error in each version of torch.
    """
    leaves = pytree.tree_leaves_with_path(output)
    for keys, leaf in leaves:
        if isinstance(leaf, (torch.Tensor, bool, int, float, str, type(None), *SYMBOLIC)):
            continue
        what = f"a {type(leaf).__name__}" + f" at output{pytree.keystr(keys)}" * bool(keys)
        is_cache = any("cache" in kind.__name__.lower() for kind in type(leaf).__mro__)
        raise UserError(f"it returns {what}, {_CACHE if is_cache else _OPAQUE}")
    if not any(isinstance(leaf, torch.Tensor) for _, leaf in leaves):
        raise UserError("it returns no tensor; return what the loss is computed from")


def _called(path: str) -> str:
    return f"its module {path}" if path else "it"


def _hooked(what: str) -> str:
    return (
        f"{what} has a hook on its gradients, which would be lost; remove it, or write a "
        "torch.autograd.Function"
    )


def _place_in_library(error: BaseException) -> str:
    """Returns `FILE:LINE: ` of the last line in another library than torch, or empty."""
    our_folders = (str(Path(torch.__file__).parent), *package_folders())
    theirs = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" in frame.filename and not frame.filename.startswith(our_folders)
    ]
    if not theirs:
        return ""
    return f"{theirs[-1].filename.rpartition('site-packages/')[2]}:{theirs[-1].lineno}: "


def _forward(model: nn.Module) -> str:
    try:
        file = inspect.getsourcefile(type(model).forward) or ""
        line = inspect.getsourcelines(type(model).forward)[1]
    except (OSError, TypeError, AttributeError):
        return ""
    return f"{file}:{line}: " if is_the_users(file) else ""
