"""Captures models larger than memory without data, and gives memory to one node at a time.

On torch's meta device a tensor has a shape but no memory. The graph and sizes of a model created
there equal those of the real one. To be measured, a node gets random parameters on the device,
which are freed before the next node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from pipedream.capture.captured import Captured
from pipedream.capture.compute_settings import IN_FULL, Precision
from pipedream.capture.errors.user_code import blame
from pipedream.capture.export import capture
from pipedream.capture.node_modules import (
    NodeModule,
    node_module,
    node_modules,
    preserve_model_state,
    run_in_order,
)
from pipedream.capture.segment import segment
from pipedream.graph.errors import UserError

META = torch.device("meta")
_DEVIATION = 0.02  # of random parameters: small enough for finite activations
_Tree = TypeVar("_Tree")


@contextmanager
def on_meta_device(source: str) -> Iterator[None]:
    """Factories called inside create models on the meta device. Raises UserError if they fail."""
    try:
        with META:
            yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{source} cannot be created without memory: {blame(error)}") from error


def check_on_meta(source: str, model: nn.Module) -> None:
    """Raises UserError if the factory created parameters on a device of its own."""
    for name, parameter in model.named_parameters():
        if parameter.device != META:
            raise UserError(
                f"{source} cannot be created without memory: it creates {name} on "
                f"{parameter.device}; leave device= out"
            )


def with_memory(inputs: _Tree) -> _Tree:
    """Replaces inputs on the meta device by those of `random_tensor` on the CPU."""

    def real(tensor: Tensor) -> Tensor:
        if tensor.device != META:
            return tensor
        return random_tensor(tensor.shape, tensor.dtype, torch.device("cpu"))

    mapped: _Tree = pytree.tree_map_only(Tensor, real, inputs)
    return mapped


def capture_fake(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    precision: Precision = IN_FULL,
    again: bool = True,
) -> Captured:
    """Captures a model on the meta device, like `capture`. Raises UserError.

    Its tensors become fake tensors that claim to be on the CPU, because what a model computes may
    depend on the device. They stay so.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in fakes:
            with mode:
                fakes[id(tensor)] = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
                )
        return fakes[id(tensor)]

    parameters: dict[int, nn.Parameter] = {}  # a tied one stays tied
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None:
                fake_parameter = parameters.setdefault(
                    id(value), nn.Parameter(fake(value), value.requires_grad)
                )
                module._parameters[name] = fake_parameter
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fake(buffer)
    args, kwargs = pytree.tree_map_only(Tensor, fake, (args, kwargs or {}))
    return capture(model, args, kwargs, precision=precision, again=again)


def random_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns standard normal numbers; zeros, which are always valid indices, for integers."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(tuple(shape), dtype=dtype, device=device)
    return torch.zeros(tuple(shape), dtype=dtype, device=device)


@contextmanager
def real_node_module(captured: Captured, node: str, device: torch.device) -> Iterator[NodeModule]:
    """Gives a node of a fake model with real memory, like those of `node_modules`, inside the
    context.

    Parameters are random, buffers zeros, running variances ones. Their memory on `device` is freed
    at the end even if they are still referenced. `captured` does not change.
    """
    part = segment(captured, [node], keep=captured.outputs)
    real = _make_real(part.module, device)
    try:
        yield node_module(captured, node, part, device)
    finally:
        for tensor in real:
            tensor.untyped_storage().resize_(0)


def real_node_modules(
    captured: Captured, values: Mapping[str, Tensor], device: torch.device
) -> Iterator[tuple[NodeModule, Mapping[str, Tensor]]]:
    """Yields each node of a fake model while it has memory, with what it reads: `values` of the
    model's inputs, and random ones.
    """
    known = captured.values

    def value(name: str) -> Tensor:
        if name in values:
            return values[name]
        return random_tensor(known[name].shape, known[name].dtype, device)

    for name in captured.working:
        with real_node_module(captured, name, device) as node:
            yield node, {name: value(name) for name in node.segment.inputs}


def run_nodes(
    captured: Captured,
    values: dict[str, Tensor],
    device: torch.device,
    run: Callable[[NodeModule, Mapping[str, Tensor]], Sequence[Tensor]],
    meta: bool,
) -> None:
    """Calls `run` for all nodes as `run_in_order` does, beginning with `values` of the model's
    inputs; buffers are restored. With `meta` the model is a fake one: see `real_node_modules`.
    """
    if meta:
        for node, read in real_node_modules(captured, values, device):
            run(node, read)
    else:
        with preserve_model_state(captured):
            run_in_order(node_modules(captured, device), values, run)


def _make_real(module: fx.GraphModule, device: torch.device) -> list[Tensor]:
    """Replaces the tensors without memory, which belong to the model; returns the new ones."""
    real: list[Tensor] = []
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if isinstance(parameter, FakeTensor):
                value = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                if value.is_floating_point() or value.is_complex():
                    value.normal_(std=_DEVIATION)
                part._parameters[name] = nn.Parameter(value, parameter.requires_grad)
                real.append(value)
        for name, buffer in part._buffers.items():
            if isinstance(buffer, FakeTensor):
                fill = torch.ones if name == "running_var" else torch.zeros
                value = fill(buffer.shape, dtype=buffer.dtype, device=device)
                part._buffers[name] = value
                real.append(value)
    return real
