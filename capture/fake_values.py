"""Runs a graph on fake tensors: shapes, types and gradients of its values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call
from torch.utils import _pytree as pytree

from pipedream.capture.autograd_functions import autograd_nodes
from pipedream.capture.compute_settings import Precision, placed


def fake_mode_of(values: Iterable[object]) -> FakeTensorMode:
    """Returns the mode of the first fake tensor among the values; a new one if there is none."""
    modes = (value.fake_mode for value in values if isinstance(value, FakeTensor))
    return next(modes, None) or FakeTensorMode(allow_non_fake_inputs=True)


def run_fake(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Calls the model with fake tensors in the place of its own and its inputs', so that nothing
    is computed and no buffer changes.
    """
    own = (each(remove_duplicate=False) for each in (model.named_parameters, model.named_buffers))
    state: dict[str, Tensor] = dict(chain.from_iterable(own))
    mode = fake_mode_of([*state.values(), *pytree.tree_leaves((args, kwargs))])

    def fake(tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)

    fakes = {id(tensor): fake(tensor) for tensor in state.values()}  # a tied one stays tied
    args, kwargs = pytree.tree_map_only(Tensor, fake, (args, kwargs))
    with mode:
        functional_call(
            model, {name: fakes[id(each)] for name, each in state.items()}, args, dict(kwargs)
        )


class CannotRun(Exception):
    """An operator of the graph failed."""

    def __init__(self, node: fx.Node, cause: RuntimeError) -> None:
        super().__init__(node.name)
        self.node, self.cause = node, cause


class _Gradients(fx.Interpreter):
    """Runs the graph on fake tensors of `device` and records the result of every operator.

    Attributes are made fake first. Otherwise torch would compute with real values, and would for
    example count a batch in batch norm that never ran.
    """

    def __init__(self, module: fx.GraphModule, mode: FakeTensorMode, device: torch.device) -> None:
        super().__init__(module)
        self.mode, self.device = mode, device
        self.seen: dict[str, Tensor] = {}

    def fetch_attr(self, target: str) -> Any:
        value = super().fetch_attr(target)
        if not isinstance(value, Tensor):
            return value
        fake = value if isinstance(value, FakeTensor) else self.mode.from_tensor(value)
        if fake.device.type == self.device.type:
            return fake
        return torch.empty_like(fake, device=self.device).requires_grad_(fake.requires_grad)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = placed((args, kwargs), self.device)
        return super().call_function(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        try:
            result = super().run_node(n)
        except RuntimeError as error:
            raise CannotRun(n, error) from error
        if isinstance(result, Tensor) and n.op != "get_attr":
            self.seen[n.name] = result
        return result


def fake_values(module: fx.GraphModule, precision: Precision) -> dict[str, Tensor]:
    """Every tensor of the graph as a fake tensor: shape, type, and whether it needs gradients.

    They are those of passes on the device of `precision`, for which autocast has rules of its own.
    """
    device = precision.device
    tensors = (*module.parameters(), *module.buffers())
    mode = fake_mode_of(tensors)
    with mode, torch.enable_grad(), precision.computing():
        inputs = [
            torch.empty(node.meta["val"].shape, dtype=node.meta["val"].dtype, device=device)
            for node in module.graph.nodes
            if node.op == "placeholder"
        ]
        interpreter = _Gradients(module, mode, device)
        results = interpreter.run(*inputs)
        # Those that no gradient comes to from any of the outputs are detached.
        reached = set(autograd_nodes(results, set()))
        return {
            name: value if value.grad_fn in reached else value.detach()
            for name, value in interpreter.seen.items()
        }
