"""What runs part of a model: as it is, or as torch.compile makes it, whole or in groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call

from pipedream.capture.grouped import Group, Grouped
from pipedream.capture.module_tensors import ModuleTensors
from pipedream.capture.rewrites.compilable import in_own_memory, leave_draws, take_writes
from pipedream.capture.rewrites.drawn_apart import DrawnApart, is_seed
from pipedream.graph.errors import UserError
from pipedream.graph.run_config import BY_GROUPS, INDUCTOR

Run: TypeAlias = Callable[[Mapping[str, Tensor], tuple[Tensor, ...]], Any]
"""(parameters and buffers by name, inputs) -> what the module gives."""


Trial: TypeAlias = Callable[[Group, Callable[..., Any]], Callable[..., Any]]
"""(group, its compiled function) -> what runs it."""


def plain(module: fx.GraphModule) -> Run:
    """Returns what runs the module as it is."""

    def run(tensors: Mapping[str, Tensor], inputs: tuple[Tensor, ...]) -> Any:
        return functional_call(module, dict(tensors), inputs)

    return run


def check_backend(backend: str, option: str = "compile") -> None:
    """Raises UserError for one of torch.compile that does not exist."""
    if backend.removeprefix(BY_GROUPS) not in torch.compiler.list_backends(exclude_tags=()):
        raise UserError(f"{option}: backend {backend!r} is not available; write {INDUCTOR}")


def compiled(
    module: fx.GraphModule, backend: str, device: torch.device, trial: Trial | None = None
) -> Run:
    """Returns what runs the module on `device`, compiled when it first runs: in one piece, or with
    BY_GROUPS in its groups, each run by what `trial` returns, if there is one.

    What dropout draws is drawn before, so that it is what it would be without compiling and does
    not divide what is compiled. Buffers are written afterwards.
    """
    apart = DrawnApart.of(module, device)
    written, state = take_writes(apart.module), ModuleTensors.of(module)
    leave_draws(apart.module)
    for seed in _seeds(apart.module):  # a compiled one would seed only once
        seed.forward = torch.compiler.disable(seed.forward)  # type: ignore[no-untyped-call]
    compute = _compute(apart.module, backend, device, trial)

    def run(tensors: Mapping[str, Tensor], inputs: tuple[Tensor, ...]) -> Any:
        buffers = [state.find(name, tensors) for name in written]
        # What a backward pass keeps of a buffer must not change.
        before = {
            each: buffer.clone()
            for name, buffer in zip(written, buffers, strict=True)
            for each in state.names[name]
        }
        results = compute({**tensors, **before}, (*inputs, *apart.values()))
        count = len(results) - len(written)
        with torch.no_grad():
            for buffer, contents in zip(buffers, results[count:], strict=True):
                buffer.copy_(contents)
        return results[:count]

    return run


def _compute(
    module: fx.GraphModule, backend: str, device: torch.device, trial: Trial | None
) -> Run:
    """Returns what runs the module by torch.compile, in one piece or in groups."""
    if backend.startswith(BY_GROUPS):
        once = _OncePerForm(backend.removeprefix(BY_GROUPS), device, trial)
        return Grouped.of(module).run_by(once)
    (output,) = module.graph.find_nodes(op="output")
    with module.graph.inserting_before(output):
        output.args = (tuple(in_own_memory(module.graph, output.args[0])),)
    module.recompile()
    made: Run = compiled_function(_on_its_own(plain(module)), backend, device)
    return made


@dataclass(frozen=True)
class _OncePerForm:
    """Compiles groups, those of one form as one function, but for those that are to be eager."""

    backend: str
    device: torch.device
    trial: Trial | None
    made: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def __call__(self, group: Group) -> Callable[..., Any]:
        if not group.compiled:
            return group.module
        if group.form not in self.made:
            module = group.module

            def run(*given: Tensor) -> Any:
                return module(*given)

            self.made[group.form] = compiled_function(_on_its_own(run), self.backend, self.device)
        made = self.made[group.form]
        return made if self.trial is None else self.trial(group, made)


def compiled_function(
    run: Callable[..., Any], backend: str, device: torch.device
) -> Callable[..., Any]:
    """Returns what torch.compile makes of it, never for shapes in general: a smaller last minibatch
    has a module of its own. On CPUs inductor leaves tensors in the order that they have: where it
    chose one by itself, torch 2.13 computed wrong gradients of a VGG, kept copies of all its
    weights, and was slower.
    """
    if backend == INDUCTOR and device.type == "cpu":
        options: dict[str, str | int | bool | Callable[..., Any]] = {"layout_optimization": False}
        return torch.compile(run, dynamic=False, options=options)
    return torch.compile(run, backend=backend, dynamic=False)


def _on_its_own(run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function with code of its own: of one code torch compiles eight forms, and runs
    all others as they are, without a word.
    """
    assert isinstance(run, FunctionType)
    own = run.__code__.replace()
    return FunctionType(own, run.__globals__, run.__name__, run.__defaults__, run.__closure__)


def _seeds(module: fx.GraphModule) -> Iterator[nn.Module]:
    """Yields what is called without arguments: modules that seed the draw after them."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            for node in filter(is_seed, part.graph.nodes):
                yield part.get_submodule(str(node.target))
