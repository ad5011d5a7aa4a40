"""Groups are compiled where that is faster, and right."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from image_models import models
from profiled import layer, profile
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException

from pipedream.capture.captured import Captured
from pipedream.capture.export import capture
from pipedream.capture.grouped import Group, Grouped
from pipedream.graph.profile import Profile, ProfiledGroups
from pipedream.profiler.report.summary import print_report
from pipedream.profiler.stretches.full_pass import _Bench
from pipedream.profiler.stretches.group_trial import GroupTrial
from pipedream.profiler.timing.passes import Stretch
from pipedream.profiler.timing.stopwatch import Stopwatch

CPU = torch.device("cpu")
BACKEND = "groups:eager"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.linear(x).relu()
        return y


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.blocks(self.first(x))
        return y


def blocks() -> tuple[Captured, dict[str, Tensor]]:
    inputs = (torch.randn(4, 8),)
    captured = capture(Blocks(), inputs)
    return captured, captured.on_device(inputs, CPU)


def failing(run: Callable[..., Any]) -> Callable[..., Any]:
    def own(*given: Tensor) -> Any:
        raise TorchDynamoException("no kernel")

    return own


def sleeping(run: Callable[..., Any]) -> Callable[..., Any]:
    def own(*given: Tensor) -> Any:
        time.sleep(0.005)
        return run(*given)

    return own


def doubled(run: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: [2 * each for each in run(*given)]


def itself(run: Callable[..., Any]) -> Callable[..., Any]:
    return run


Change = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass
class Changed(GroupTrial):
    """Of groups that run in other ways than they are."""

    eager: Change = itself
    made: Change = itself

    def __call__(self, group: Group, made: Callable[..., Any]) -> Callable[..., Any]:
        changed = replace(group, module=self.eager(group.module))  # type: ignore[arg-type]
        return super().__call__(changed, self.made(made))


@pytest.mark.parametrize(
    ("eager", "made", "is_compiled", "is_measured"),
    [
        (sleeping, itself, True, True),
        (itself, sleeping, False, True),
        (sleeping, doubled, False, False),
        (sleeping, failing, False, False),
    ],
)
def test_groups_are_compiled_where_that_is_faster_and_right(
    eager: Change, made: Change, is_compiled: bool, is_measured: bool
) -> None:
    captured, given = blocks()
    trial = Changed(CPU, Stopwatch(), captured.module_paths, eager=eager, made=made)
    tried = Stretch(captured, captured.working, Stopwatch(), CPU, False, BACKEND, trial=trial)
    turn = tried.run(given)
    alone, equal = sorted(trial.tried.values(), key=lambda each: each.groups)
    assert (alone.groups, equal.groups) == (1, 3)
    assert {*alone.nodes, *equal.nodes} == set(captured.working)
    assert equal.module == "blocks.0"
    for found in (alone, equal):
        assert found.compiled is is_compiled
        assert (found.compiled_seconds is not None) is is_measured
        assert found.eager_saved_bytes > 0 or found is alone
    plain = Stretch(captured, captured.working, Stopwatch(), CPU, False)
    for name, value in plain.run(given).values.items():
        torch.testing.assert_close(turn.values[name], value)


@pytest.mark.slow
def test_what_is_measured_of_groups_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """With the groups that are not compiled left as they are where the model is timed."""
    inputs = (torch.randn(2, 3, 32, 32),)
    captured = capture(models.resnet18(num_classes=4), inputs)
    given = captured.on_device(inputs, CPU).values()
    bench = _Bench(captured, given, CPU, None, [BACKEND])  # type: ignore[arg-type]
    bench.warm_up()
    bench.divide()
    assert sum(own.groups for own in bench.groups) == 10
    eager = {node for own in bench.groups if not own.compiled for node in own.nodes}
    ((*_, whole),) = bench.divisions.values()
    left = [g for g in Grouped.of(whole[0].stretch.part.module).groups if not g.compiled]
    assert {node for group in left for node in group.nodes} == eager == set(bench.eager)


def of(module: str, **given: Any) -> ProfiledGroups:
    own: dict[str, Any] = {
        "groups": 1,
        "nodes": (f"node_{module}",),
        "eager_seconds": 0.004,
        "eager_saved_bytes": 3000,
    }
    return ProfiledGroups(module=module, **(own | given))


def measured(*groups: ProfiledGroups) -> Profile:
    found = {"compile": "groups:inductor", "compiled_groups": groups}
    made: Profile = profile(layer("embeddings", "Flatten"), layer("block")).model_copy(update=found)
    return made


def test_groups_are_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    made = {"compiled_seconds": 0.003, "compiled_saved_bytes": 1000, "compile_seconds": 0.5}
    found = measured(
        of("embeddings", compiled=False),
        of("layer.0", compiled=True, groups=2, nodes=("node_block",) * 2, **made),
    )
    assert found.eager_nodes == ("node_embeddings",)
    assert found.model_copy(update={"compile": "inductor"}).eager_nodes == ()
    print_report(found)
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if line[:1].isdecimal()]
    assert [row[: 4 + k] for k, row in enumerate(rows)] == [
        ["2", "compiled", "complicated", "layer.0"],
        ["1", "as", "it", "is", "one-to-one"],
    ]
    assert "fails" in out
    assert (
        "Of 3 groups of layers 2 are faster compiled, each by itself: 6 ms instead of 8 ms" in out
    )
    print_report(measured(of("embeddings", compiled=False)))
    assert "No group of layers is faster compiled." in capsys.readouterr().out
