"""Checks that a captured graph keeps the backward pass of every autograd function of the model.

What the model calls is read from autograd itself, from the graph behind the outputs of the exported
call. So the check also holds for a version of torch in which autograd_functions.py has no effect.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import fx, nn
from torch.autograd.function import BackwardCFunction

from pipedream.capture.autograd_functions import SPACE, autograd_nodes, is_torchs_own
from pipedream.graph.errors import UserError


@contextmanager
def functions_on_gradients(model: nn.Module) -> Iterator[Counter[str]]:
    """Counts by name the user's autograd functions that gradients of a call run through.

    The counts are those of the last call of `model` inside this context.
    """
    counts: Counter[str] = Counter()

    def look(module: nn.Module, args: object, output: object) -> None:
        counts.clear()
        counts.update(
            node._forward_cls.__name__  # type: ignore[attr-defined]
            for node in autograd_nodes(output, set())
            if isinstance(node, BackwardCFunction) and not is_torchs_own(node._forward_cls)
        )

    with model.register_forward_hook(look):
        yield counts


def check_backward_passes(called: Counter[str], exported: fx.GraphModule) -> None:
    """Raises UserError unless each function that was called is an operator of `exported`."""
    operators = Counter(
        target._schema.name.removeprefix(f"{SPACE}::").partition(".")[0]
        for module in exported.modules()  # regions such as torch.no_grad are modules of their own
        if isinstance(module, fx.GraphModule)
        for target in (node.target for node in module.graph.nodes)
        if isinstance(target, torch._ops.OpOverload) and target.namespace == SPACE
    )
    for name in called - operators:
        raise UserError(
            f"the backward pass of autograd function {name} would be lost, because torch "
            f"{torch.__version__} traces through the function; register it as an operator with "
            "torch.library.custom_op and register_autograd, or use another version of torch"
        )
