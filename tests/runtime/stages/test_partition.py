"""What each stage computes, holds, sends and receives; and that another model is refused."""

from __future__ import annotations

import ast
import gc
import weakref
from pathlib import Path

import pytest
import small_models
import torch
from plans import cut, make_plan
from torch import nn

from pipedream.capture.captured import Captured
from pipedream.capture.export import capture
from pipedream.comm.rank_info import RankInfo
from pipedream.graph.errors import UserError
from pipedream.graph.plan import Plan
from pipedream.graph.run_config import DataFactory, Factory, RunConfig
from pipedream.runtime.local.local_model import LocalModel
from pipedream.runtime.run.job import Job
from pipedream.runtime.stages.partition import interfaces, links, source_text, tied


def planned(model: nn.Module, stages: int, *inputs: torch.Tensor) -> tuple[Captured, Plan]:
    captured = capture(model, inputs or (torch.randn(4, 6),))
    return captured, make_plan(captured.graph, cut(captured.graph, stages), [1] * stages)


def test_stages_run_one_after_the_other_are_the_model() -> None:
    torch.manual_seed(0)
    model, x = small_models.Skips(), torch.randn(4, 6)
    captured, plan = planned(model, 3, x)
    values = {captured.inputs[0]: x}
    for interface in interfaces(captured, plan):
        piece = interface.build(captured)
        results = piece.module(*(values[name] for name in piece.inputs))
        values |= dict(zip(piece.outputs, results, strict=True))
    torch.testing.assert_close(values[captured.outputs[0]], model(x), rtol=0, atol=0)


def test_each_value_is_sent_once_to_each_stage_that_reads_it() -> None:
    captured, plan = planned(small_models.Skips(), 3)
    found = interfaces(captured, plan)
    for interface in found:
        for target, values in interface.sends.items():
            assert found[target].receives[interface.stage] == values
            assert len({value.name for value in values}) == len(values)
    assert links(found) == tuple((a.stage, b) for a in found for b in a.sends)


class TwoOutputs(nn.Module):
    """The first output is made by the first layer, as an auxiliary head's is."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        early = self.a(x)
        return early, self.c(self.b(early))


def test_an_early_output_of_the_model_travels_to_the_last_stage() -> None:
    captured = capture(TwoOutputs(), (torch.randn(4, 6),))
    plan = make_plan(captured.graph, [["node1", "node2"], ["node3"], ["node4"]], [1, 1, 1])
    first, _, last = interfaces(captured, plan)
    assert captured.outputs[0] in {value.name for value in first.sends[2]}
    assert 0 in last.receives


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, late: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x))) + late


def test_a_stage_reads_inputs_of_the_model_itself() -> None:
    captured, plan = planned(TwoInputs(), 2, torch.randn(4, 6), torch.randn(4, 6))
    first, last = interfaces(captured, plan)
    assert list(first.reads.values()) == [0]
    assert list(last.reads.values()) == [1]
    assert len(first.sends[1]) == 1


def test_tied_parameters_are_found_across_stages() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Tanh(), nn.Linear(4, 10, bias=False))
    model[2].weight = model[0].weight
    captured, plan = planned(model, 2, torch.randint(0, 10, (4, 3)))
    assert tied(captured, interfaces(captured, plan)) == {"0.weight": (0, 1)}
    _, whole = planned(model, 1, torch.randint(0, 10, (4, 3)))
    assert tied(captured, interfaces(captured, whole)) == {}


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (nn.Sequential(nn.Linear(6, 6), nn.Tanh()), "node3 is 'ReLU()' in the plan and 'Tanh()'"),
        (nn.Sequential(nn.Linear(6, 6)), "node3 is 'ReLU()' in the plan and the model has no more"),
        (
            nn.Sequential(nn.Linear(6, 7), nn.ReLU()),
            "node2 is 'Linear(in_features=6, out_features=6, bias=True)' in the plan and "
            "'Linear(in_features=6, out_features=7, bias=True)'",
        ),
    ],
)
def test_a_plan_for_another_model_is_refused_with_the_first_difference(
    other: nn.Module, difference: str
) -> None:
    _, plan = planned(nn.Sequential(nn.Linear(6, 6), nn.ReLU()), 2)
    with pytest.raises(UserError, match="made for another model") as refused:
        interfaces(capture(other, (torch.randn(4, 6),)), plan)
    assert difference in str(refused.value)


def test_the_stage_can_be_read_as_python() -> None:
    captured, plan = planned(small_models.Skips(), 3)
    interface = interfaces(captured, plan)[1]
    text = source_text(captured, plan, interface, interface.build(captured))
    ast.parse(text)
    assert text.startswith('"""Stage 1 of 3, on rank 1.')
    assert "class Stage1(torch.nn.Module)" in text
    assert "# node4: Linear(in_features=6, out_features=6, bias=True)" in text
    assert "receives tanh (4, 6) float32 from stage 0" in text
    assert " = None" not in text


@pytest.mark.slow
def test_a_rank_holds_its_own_stage_and_nothing_else_of_the_model(tmp_path: Path) -> None:
    _, plan = planned(small_models.Chain(), 3)
    config = RunConfig(
        format="pipedream-run/1",
        model=Factory(source="small_models:Chain"),
        data=DataFactory(source="small_models:regression"),
        loss="mse_loss",
        batch_size=4,
    )
    held: list[weakref.ref[nn.Parameter]] = []
    original = small_models.Chain.__init__

    def remember(self: small_models.Chain) -> None:
        original(self)
        held.extend(weakref.ref(parameter) for parameter in self.parameters())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_models.Chain, "__init__", remember)
        job = Job(plan, config, Path(small_models.__file__).parent, tmp_path)
        (stage,) = LocalModel(job, RankInfo(1, 3, 1, 3, "127.0.0.1", 1)).stages
    gc.collect()
    alive = [parameter for ref in held if (parameter := ref()) is not None]
    assert len(held) == 6
    assert {id(parameter) for parameter in alive} == set(map(id, stage.parameters.values()))
    assert set(stage.parameters) == {"b.linear.weight", "b.linear.bias"}
