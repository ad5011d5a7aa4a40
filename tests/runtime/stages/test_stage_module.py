"""A stage for two sizes of minibatches: one model, or a clear word that it is not."""

from __future__ import annotations

import pytest
import small_models
import torch
from plans import cut, make_plan
from torch import Tensor, nn

from pipedream.capture.captured import Captured
from pipedream.capture.export import capture
from pipedream.graph.errors import UserError
from pipedream.graph.plan import Plan
from pipedream.runtime.data.batch import Batch
from pipedream.runtime.stages.stage_forms import StageForms
from pipedream.runtime.stages.stage_module import StageModule, capture_rest

BATCH = Batch((torch.randn(4, 6),), None)


class Fixed(small_models.Chain):
    """Has the size of its minibatches written into it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).reshape(4, 2, 3)


class Longer(small_models.Chain):
    """Does more for a few examples."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if len(x) > 3 else y.exp()


class Other(small_models.Chain):
    """Takes another layer, of the same kind, for a few examples."""

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(x) if len(x) > 3 else self.a(x)) + self.a(x)


class Crossing(small_models.Chain):
    """Returns what an early stage makes, too, for a few examples."""

    def forward(self, x: Tensor) -> list[Tensor]:
        first = self.a(x)
        last = self.c(self.b(first))
        return [last] if len(x) > 3 else [last, first]


@pytest.mark.parametrize(
    ("model", "rest", "says"),
    [
        (
            Fixed,
            3,
            r"test_stage_module.py:\d+: Fixed cannot be captured: RuntimeError: shape .*invalid",
        ),
        (Longer, 3, "the model differs: the plan has no more nodes where .* 'Exp'"),
        (Other, 3, r"the model differs: node\d \(.*\) is of another module"),
        (Crossing, 3, "the model differs: other stages exchange tensors"),
        (small_models.Noisy, 1, "Expected more than 1 value per channel when training"),
    ],
)
def test_why_a_model_does_not_take_the_rest(model: type[nn.Module], rest: int, says: str) -> None:
    made = model()
    whole = capture(made, BATCH.inputs)
    plan = make_plan(whole.graph, cut(whole.graph, 4), (1, 1, 1, 1))
    with pytest.raises(UserError, match=says):
        capture_rest(made, BATCH, rest, whole, plan)


class Sized(nn.Module):
    """Computes with the number of its examples, and with a mask made for it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.c = small_models.Layer(6), nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.register_buffer("steps", torch.ones(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        count = x.shape[0]
        causal = torch.ones(count, count, device=x.device).tril() / torch.tensor(float(count))
        hidden = self.norm(self.a(x).reshape(count * 2, 3).reshape(count, 6))
        return self.c(causal @ hidden * self.steps)


def test_each_size_computes_what_the_plain_model_does_and_they_have_one_state() -> None:
    """Batch norm moves on with either; a mask or a number is that of the size."""
    torch.manual_seed(1)
    model, reference = Sized(), Sized()
    reference.load_state_dict(model.state_dict())
    whole = capture(model, BATCH.inputs)
    plan = make_plan(whole.graph, cut(whole.graph, 1), (1,))
    rest = capture_rest(model, BATCH, 3, whole, plan)
    usual, smaller = stage_module(whole, plan), stage_module(rest, plan)
    smaller.share(usual, {name for name, _ in model.named_buffers()})
    tensors = dict(usual.piece.module.named_parameters())
    forms = StageForms(usual, {2: smaller})
    for minibatch, count in enumerate((4, 4, 3, 4)):
        x = torch.randn(count, 6)
        used = forms.of(minibatch)
        assert used is (smaller if count == 3 else usual)
        known = dict(zip(used.piece.outputs, used.compute(tensors, (x,)), strict=True))
        torch.testing.assert_close(used.output(known), reference(x))
    mine = dict(usual.piece.module.named_buffers())
    for name, buffer in reference.named_buffers():
        torch.testing.assert_close(mine[name], buffer)


def test_buffers_are_shared_where_a_device_has_copies_of_them() -> None:
    """As on a GPU, where each form got its own: here they are of two models."""
    stage_modules = []
    for count in (4, 3):
        captured = capture(Sized(), BATCH.first(count).inputs)
        stage_modules.append(
            stage_module(captured, make_plan(captured.graph, cut(captured.graph, 1), (1,)))
        )
    whole, rest = (dict(each.piece.module.named_buffers()) for each in stage_modules)
    names = {name for name, _ in Sized().named_buffers()}
    assert names == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "steps"}
    assert all(rest[name] is not whole[name] for name in names)
    stage_modules[1].share(stage_modules[0], names)
    shared = dict(stage_modules[1].piece.module.named_buffers())
    assert all(shared[name] is whole[name] for name in names)
    assert all(shared[name] is rest[name] for name in rest.keys() - names), "masks are its own"
    assert rest.keys() > names


def stage_module(captured: Captured, plan: Plan) -> StageModule:
    return StageModule.of(captured, plan, 0)
