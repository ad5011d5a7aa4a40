"""Modules that run group by group do what they do in one piece."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from image_models import models, small_densenet, small_vit
from torch import Tensor, fx, nn
from transformers import GPT2Config, GPT2LMHeadModel
from users.backends import registered

from pipedream.capture.compiled import compiled, plain
from pipedream.capture.export import capture
from pipedream.capture.grouped import Grouped, mark_groups
from pipedream.capture.rewrites.drawn_apart import DrawnApart
from pipedream.capture.segment import Segment, freeze_constants, segment
from pipedream.runtime.stages.randomness import MinibatchRng, seed_each

CPU = torch.device("cpu")


class Block(nn.Module):
    """Learns statistics, draws, and writes into what it has made."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.linear(x))
        y[:, 0] += 1
        return x + self.drop(y.relu_())


class Blocks(nn.Module):
    """The second and the last layer share a weight; a buffer counts in two of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        y = self.blocks(self.first(x))
        self.calls *= 2
        return self.last(y), y * self.calls


def gpt() -> nn.Module:
    config = GPT2Config(
        n_layer=3,
        n_head=2,
        n_embd=16,
        vocab_size=50,
        n_positions=8,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def images(size: int = 32, batch: int = 2) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 3, size, size, dtype=torch.float64),)


def rows(count: int = 4) -> tuple[Tensor, ...]:
    return (torch.randn(count, 8, dtype=torch.float64),)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "blocks": (Blocks, rows),
    "gpt": (gpt, lambda: (torch.randint(50, (2, 8)),)),
    "resnet": (lambda: models.resnet18(num_classes=4), images),
    "vit": (small_vit, images),
    "densenet": (small_densenet, images),
    "no blocks": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()), rows),
}


def made(name: str) -> tuple[Segment, tuple[Tensor, ...], MinibatchRng]:
    torch.manual_seed(0)
    model, inputs = MODELS[name]
    given = inputs()
    captured = capture(model().double(), given)
    part = freeze_constants(segment(captured, captured.working, captured.outputs), captured.owner)
    rng = MinibatchRng(0, CPU)
    seed_each(part, captured.module, rng)
    mark_groups(part.module, captured, captured.working)
    return part, given, rng


def learned(
    part: Segment, run: Callable[..., Any], inputs: tuple[Tensor, ...]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Returns what two passes give, with their gradients, and the buffers after them."""
    before = {name: tensor.clone() for name, tensor in part.state.items()}
    state = {
        name: tensor.detach().clone().requires_grad_(tensor.requires_grad)
        for name, tensor in dict(
            (*part.module.named_parameters(), *part.module.named_buffers())
        ).items()
    }
    found = []
    for _ in range(2):
        results = [each for each in run(state, inputs) if each.requires_grad]
        wanted = [each for each in state.values() if each.requires_grad]
        total = torch.stack([each.square().mean() for each in results]).sum()
        gradients = torch.autograd.grad(total, wanted, allow_unused=True)
        found += [each.detach() for each in (*results, *gradients) if each is not None]
    for name, tensor in part.state.items():
        assert torch.equal(tensor, before[name]), f"{name} of the module itself has changed"
    return found, {name: each for name, each in state.items() if not each.requires_grad}


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", MODELS)
def test_groups_compute_what_the_module_does(name: str) -> None:
    part, inputs, _ = made(name)
    grouped = Grouped.of(part.module)
    operators = [n for g in grouped.groups for n in g.module.graph.nodes if n.op.startswith("call")]
    whole = [n for n in part.module.graph.nodes if n.op.startswith("call")]
    assert [n.target for n in operators] == [n.target for n in whole]
    wanted = learned(part, plain(part.module), inputs)
    found = learned(part, grouped.run_by(lambda group: group.module), inputs)
    assert_same(found, wanted)


def test_equal_blocks_have_one_form() -> None:
    part, _, _ = made("gpt")
    grouped = Grouped.of(part.module)
    assert len(grouped.groups) == 6  # the last norm is not of the module that has the head
    assert len({group.form for group in grouped.groups[1:-2]}) == 3  # of draws the seeds differ
    grouped = Grouped.of(DrawnApart.of(part.module, CPU).module)
    assert len({group.form for group in grouped.groups[1:-2]}) == 1
    torch.manual_seed(0)
    captured = capture(models.resnet18(num_classes=4), (torch.randn(2, 3, 32, 32),))
    part = segment(captured, captured.working, captured.outputs)
    mark_groups(part.module, captured, captured.working)
    grouped = Grouped.of(part.module)
    assert (len(grouped.groups), grouped.forms) == (10, 9)  # only layer1 has two that are equal


def counting() -> tuple[str, list[str]]:
    """The name of a backend that compiles nothing, and the code that it was given so far."""
    calls: list[str] = []

    def note(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        calls.append(module.code)
        return module.forward

    return registered(note), calls


def test_groups_of_one_form_are_compiled_once() -> None:
    """Dropout that is drawn before, and the parameters, are given to the function."""
    backend, calls = counting()
    part, inputs, rng = made("blocks")
    run = compiled(part.module, f"groups:{backend}", CPU)
    for rng.minibatch in range(2):
        assert_same(learned(part, run, inputs), learned(part, plain(part.module), inputs))
    assert len(calls) == 4, calls  # what comes before, two groups; the blocks; what comes after


def test_groups_that_are_to_be_eager_are_not_compiled() -> None:
    """Those of one block: the two before and after it are."""
    backend, calls = counting()
    part, inputs, rng = made("blocks")
    captured = capture(Blocks().double(), inputs)
    paths = captured.module_paths
    own = [name for name in captured.graph.order if f"{paths.get(name)}.".startswith("blocks.1.")]
    mark_groups(part.module, captured, captured.working, own)
    eager = [group for group in Grouped.of(part.module).groups if not group.compiled]
    assert [group.nodes for group in eager] == [tuple(own)]
    run = compiled(part.module, f"groups:{backend}", CPU)
    for rng.minibatch in range(2):
        assert_same(learned(part, run, inputs), learned(part, plain(part.module), inputs))
    once = calls.copy()
    assert len(once) == 4  # the others are of the same form
    mark_groups(part.module, captured, captured.working, captured.working)
    run = compiled(part.module, f"groups:{backend}", CPU)
    assert_same(learned(part, run, inputs), learned(part, plain(part.module), inputs))
    assert calls == once


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["gpt", "resnet", "vit"])
def test_compiled_groups_compute_the_same(name: str) -> None:
    torch._dynamo.reset()
    part, inputs, _ = made(name)
    run = compiled(part.module, "groups:aot_eager", CPU)
    assert_same(learned(part, run, inputs), learned(part, plain(part.module), inputs))


def test_no_value_is_held_longer_than_it_is_read() -> None:
    part, _, _ = made("gpt")
    groups = Grouped.of(part.module).groups
    last: dict[str, int] = {}
    for number, group in enumerate(groups):
        last |= dict.fromkeys((*group.takes, *group.gives), number)
    values = {name for group in groups for name in group.gives} - set(groups[-1].gives)
    ended = [(name, number) for number, group in enumerate(groups) for name in group.ends]
    assert dict(ended).items() >= {(name, last[name]) for name in values}
    assert len(ended) == len(dict(ended))


class Reduced(nn.Module):
    """Many short rows and few long ones, which a GPU's usual mapping keeps idle (seed 003, 5.3)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.blocks = nn.Parameter(torch.ones(())), nn.ModuleList([nn.Softmax(1)])

    def forward(self, short: Tensor, long: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = (self.scale * long).sum(1)
        return (self.scale * short).sum(1), rows, self.blocks[0](self.scale * short).square().sum(1)


@pytest.mark.thorough
def test_awkward_reductions_are_equal_compiled() -> None:
    """Other mappings than torch's own were not faster: scripts/bench/groups/reductions.py."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    given = tuple(torch.randn(shape).double() for shape in ((750_000, 32), (64, 30_000)))
    captured = capture(Reduced().double(), given)
    part = segment(captured, captured.working, captured.outputs)
    mark_groups(part.module, captured, captured.working)
    known = dict(zip(captured.inputs, given, strict=True))
    inputs = tuple(known[name] for name in part.inputs)
    wanted = learned(part, plain(part.module), inputs)
    found = learned(part, compiled(part.module, "groups:inductor", CPU), inputs)
    for one, other in zip(found[0], wanted[0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
