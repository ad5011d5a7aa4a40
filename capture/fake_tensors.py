"""Models too large for memory: made and captured without data, and real one node at a time.

On torch's meta device a tensor has a shape and no memory. A model made there is captured as any
other; its graph and bytes are those of the real one. To be timed, a node is given random
parameters on the device, which are freed before the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from pipedream.capture.export import Captured, capture
from pipedream.capture.node_modules import NodeModule
from pipedream.capture.segment import freeze_constants, segment
from pipedream.capture.sources.user_code import blame
from pipedream.graph.errors import UserError

META = torch.device("meta")
_DEVIATION = 0.02  # of random parameters: small, so that activations stay finite
_Tree = TypeVar("_Tree")


@contextmanager
def on_meta_device(source: str) -> Iterator[None]:
    """A factory called in here makes its model on the meta device. Raises UserError."""
    try:
        with META:
            yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{source} cannot be made without memory: {blame(error)}") from error


def check_on_meta(source: str, model: nn.Module) -> None:
    """Raises UserError where the factory has made parameters on a device that it names itself."""
    for name, parameter in model.named_parameters():
        if parameter.device != META:
            raise UserError(
                f"{source} cannot be made without memory: it makes {name} on {parameter.device}; "
                "leave device= out"
            )


def with_data(inputs: _Tree) -> _Tree:
    """Inputs that a factory made on the meta device, on the CPU: see `random_tensor`."""

    def real(tensor: Tensor) -> Tensor:
        device = torch.device("cpu") if tensor.device == META else tensor.device
        return (
            random_tensor(tensor.shape, tensor.dtype, device) if tensor.device != device else tensor
        )

    mapped: _Tree = pytree.tree_map_only(Tensor, real, inputs)
    return mapped


def capture_fake(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> Captured:
    """As `capture`, of a model on the meta device. Raises UserError.

    What a model does may depend on the device; so its tensors are made fake ones, which say that
    they are on the CPU, and stay so.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    made: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            with mode:
                made[id(tensor)] = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
                )
        return made[id(tensor)]

    parameters: dict[int, nn.Parameter] = {}  # a tied one stays tied
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None:
                own = parameters.setdefault(
                    id(value), nn.Parameter(fake(value), value.requires_grad)
                )
                module._parameters[name] = own
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fake(buffer)
    args, kwargs = pytree.tree_map_only(Tensor, fake, (args, kwargs or {}))
    return capture(model, args, kwargs)


def random_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Standard normal numbers, or zeros where they are whole: those are indices into anything."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(tuple(shape), dtype=dtype, device=device)
    return torch.zeros(tuple(shape), dtype=dtype, device=device)


@contextmanager
def real_node_module(captured: Captured, node: str, device: torch.device) -> Iterator[NodeModule]:
    """A node of a fake model with real memory, like those of `node_modules`, inside the context.

    Parameters are random, buffers zeros, running variances ones; all have memory on `device`, which
    is given back at the end whoever still holds them. `captured` stays as it is.
    """
    part = segment(captured, [node], keep=captured.outputs)
    made = _make_real(part.module, device)
    try:
        freeze_constants(part.to(device), captured.owner)
        wants = tuple(captured.values[name].requires_grad for name in part.inputs)
        parameters = tuple(p for p in part.module.parameters() if p.requires_grad)
        yield NodeModule(node, part, wants, parameters)
    finally:
        for tensor in made:
            tensor.untyped_storage().resize_(0)


def _make_real(module: fx.GraphModule, device: torch.device) -> list[Tensor]:
    """Puts tensors with memory in place of those without: the piece held the model's very own."""
    made: list[Tensor] = []
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if isinstance(parameter, FakeTensor):
                value = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                if value.is_floating_point() or value.is_complex():
                    value.normal_(std=_DEVIATION)
                part._parameters[name] = nn.Parameter(value, parameter.requires_grad)
                made.append(value)
        for name, buffer in part._buffers.items():
            if isinstance(buffer, FakeTensor):
                fill = torch.ones if name == "running_var" else torch.zeros
                value = fill(buffer.shape, dtype=buffer.dtype, device=device)
                part._buffers[name] = value
                made.append(value)
    return made
