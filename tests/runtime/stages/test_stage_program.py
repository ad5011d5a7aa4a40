"""What torch.compile is given of a stage on a mesh: pieces between redistributions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from sharded_runs import Case, captured, sharded_plan
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from users.backends import registered

from pipedream.capture.programs.localize import Redistribution
from pipedream.graph.run_config import BY_GROUPS
from pipedream.runtime.stages.randomness import MinibatchRng
from pipedream.runtime.stages.stage_module import StageModule
from pipedream.runtime.stages.stage_program import StageProgram


def test_pieces_between_redistributions_are_compiled() -> None:
    """Redistributions are called as they are, each time, with real tensors."""
    moved: list[Tensor] = []
    pieces: list[fx.GraphModule] = []

    def move(local: Tensor, shape: tuple[int, ...], steps: Sequence[Any]) -> Tensor:
        moved.append(local)
        return local + 1

    def backend(module: fx.GraphModule, _: Sequence[Tensor]) -> Callable[..., Any]:
        pieces.append(module)
        return module.forward

    graph = fx.Graph()
    x = graph.placeholder("x")
    for _ in range(3):
        x = graph.call_function(torch.mul, (x, x))
        x = graph.call_function(Redistribution(move, (2,), ()), (x,))
    graph.output((graph.call_function(torch.neg, (x,)),))
    program = _program(BY_GROUPS + registered(backend))  # which are not those of modules
    run = program._compiled(fx.GraphModule(torch.nn.Module(), graph))
    for start in (1.0, 2.0):
        (found,) = run(torch.tensor([start, 3.0]))
        expected = torch.tensor([start, 3.0])
        for _ in range(3):
            expected = expected * expected + 1
        torch.testing.assert_close(found, -expected)
    assert len(pieces) == 4
    assert len(moved) == 2 * 3
    assert not any(isinstance(tensor, FakeTensor) for tensor in moved)


def _program(backend: str) -> StageProgram:
    """That of a stage on a mesh."""
    whole = captured("Perceptron")
    plan = sharded_plan("Perceptron", Case("two"), whole)
    form = StageModule.of(whole, plan, 0, MinibatchRng(0, torch.device("cpu")))
    return replace(form.program, backend=backend)
