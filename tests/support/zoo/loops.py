"""What a module learns in a loop of the user's own over `Pipeline`, on the one rank of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from plans import make_plan
from torch import Tensor
from torch.utils import _pytree as pytree

from pipedream.capture.captured import Captured
from pipedream.runtime.pipeline import Pipeline
from zoo.learned import UPDATES, Learned, optimizer, tensors_of
from zoo.piped import meet
from zoo.specimens import Inputs, Specimen, loss_of


def by_pipeline(specimen: Specimen, captured: Captured) -> Learned:
    """As `plain`: each minibatch is cut into two microbatches."""
    meet()
    learned, model, given = Learned(), specimen.model(), list[list[Tensor]]()

    def loss(output: Any, target: Any) -> Tensor:
        given.append(tensors_of(output))
        return loss_of(output)

    plan = make_plan(captured.graph, [captured.graph.order], (1,), "flush")
    pipeline = Pipeline(model, plan, loss, microbatches=2, device="cpu", seed=5)
    learning = optimizer(list(model.parameters()))
    for update in range(UPDATES):
        args, kwargs = _together([specimen.call(update, k, 4) for k in range(2)])
        given.clear()
        value = pipeline(*args, **kwargs)
        value.backward()
        learned.losses.append(value.item())
        # Before the first of them the run has compared its passes with the model's.
        learned.outputs.append([tensor for each in given[-2:] for tensor in each])
        named = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        learned.gradients.append({n: gradient.clone() for n, gradient in named.items()})
        if learning is not None:
            learning.step()
            learning.zero_grad()
    pipeline.gather()
    learned.parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    learned.buffers = {n: b.detach().clone() for n, b in model.named_buffers()}
    return learned


def _together(calls: Sequence[Inputs]) -> Inputs:
    """One minibatch of these microbatches."""
    leaves, specs = zip(*map(pytree.tree_flatten, calls), strict=True)
    joined = [
        torch.cat(each) if isinstance(each[0], Tensor) else each[0]
        for each in zip(*leaves, strict=True)
    ]
    whole: Inputs = pytree.tree_unflatten(joined, specs[0])
    return whole
