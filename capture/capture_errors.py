"""One-line errors for models that cannot be captured: where, why, and what to do."""

from __future__ import annotations

import inspect
import re
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils import _pytree as pytree

from pipedream.capture.sources.user_code import blame, is_the_users, package_folders, place
from pipedream.graph.errors import UserError

DATA_DEPENDENT = (
    "its control flow, a number or a shape depends on the data; use torch.where or masks of fixed "
    "shape, or move this part out of the model"
)

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)  # numbers that depend on the data

# Errors of torch, matched by "CLASS: MESSAGE", and what they mean to the user.
_KNOWN = (
    (r"^GuardOnDataDependentSymNode|^DynamicOutputShape", DATA_DEPENDENT),
    (r"\.numpy\(\) is not supported", "it converts a tensor to numpy, which loses the graph and "
     "the gradient; use torch's functions"),
    (r"FakeTensor.__format__", "it formats the value of a tensor, which is unknown during the "
     "capture; leave the print or log out of forward"),
    (r"nested_?tensor|is not tracked with proxy", "nested tensors have no fixed shape; pad to a "
     "fixed length and use a mask"),
    (r"fake tensor in the exported program constant's list", "it writes to a tensor's .data, or "
     "does something else that torch.export cannot trace; write it as operators on tensors"),
    (r"not linked with support for cuda|Found no NVIDIA driver|Torch not compiled with CUDA",
     "it moves a tensor to a GPU, and there is none; write .to(x.device), x being an input"),
    (r"missing the required \"forward\" function", "it has no forward: return a module that has "
     "one, such as nn.Sequential"),
    (r"_add_batch_dim|functorch", "it uses torch.func or vmap; write the batched operators "
     "instead"),
    (r"Cannot access data pointer|erroneously tracing into a custom kernel", "it copies a module "
     "or calls an extension, and tensors have no data during the capture; register the extension "
     "with torch.library.custom_op and a fake implementation"),
    (r"UnsupportedOperatorException|NotImplementedError: (aten|\w+)::", "torch.export cannot "
     "trace this operator; use others, or register it with torch.library.custom_op"),
)  # fmt: skip


def capture_error(error: BaseException, model: nn.Module) -> UserError:
    """The UserError for an error that `model` raised during the capture."""
    known = f"{type(error).__name__}: {error}"
    reason = next((means for sign, means in _KNOWN if re.search(sign, known)), None)
    if isinstance(error, UserError):
        reason = error.message
    elif any(
        "torch/distributed/" in frame.filename
        for frame in traceback.extract_tb(error.__traceback__)
    ):
        reason = (
            "it calls torch.distributed; leave communication to pd-train, which adds it between "
            "stages and replicas"
        )
    elif reason is None:
        reason = blame(error).removeprefix(place(error))
    return cannot_capture(model, reason, place(error) or _place_in_library(error))


def cannot_capture(model: nn.Module, reason: str, where: str = "") -> UserError:
    """The UserError for `reason`; `where` is `FILE:LINE: `, by default of the user's forward."""
    name = type(model).__name__
    return UserError(f"{where or _forward(model)}{name} cannot be captured: {reason}")


def place_of(node: fx.Node) -> str:
    """`FILE:LINE: ` of the code that called an operator of an exported graph, or empty."""
    files = re.findall(r'File "(.+)", line (\d+)', node.meta.get("stack_trace") or "")
    theirs = [each for each in files if is_the_users(each[0])] or files
    return "{}:{}: ".format(*theirs[-1]) if theirs else ""


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
    """A forward hook that raises UserError if an output is neither a tensor nor a plain value.

    torch.export would fail, but with another error in each version of torch.
    """
    for leaf in pytree.tree_leaves(output):
        if not isinstance(leaf, (torch.Tensor, bool, int, float, str, type(None), *SYMBOLIC)):
            raise UserError(
                "it returns an object that torch cannot take apart into tensors; return tensors, "
                "or tuples, lists or dicts of them, or register its class with "
                "torch.export.register_dataclass"
            )


def _called(path: str) -> str:
    return f"its module {path}" if path else "it"


def _hooked(what: str) -> str:
    return (
        f"{what} has a hook on its gradients, which would be lost; remove it, or write a "
        "torch.autograd.Function"
    )


def _place_in_library(error: BaseException) -> str:
    """`FILE:LINE: ` of the last line in a library other than torch and this package, or empty."""
    own = (str(Path(torch.__file__).parent), *package_folders())
    theirs = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" in frame.filename and not frame.filename.startswith(own)
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
