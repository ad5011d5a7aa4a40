"""Every strategy of every rule, executed in parts in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from divided import Executed, executed_by, executed_in, wrong_strategies
from joint_models import MODELS, traced_model
from torch import Tensor, nn
from torch.nn import functional as F

from pipedream.capture.programs.description import describe, describe_operator
from pipedream.graph.placements.operators import Operator, OperatorGraph
from pipedream.graph.placements.placement import Partial, Replicate, Shard, show_placements
from pipedream.sharding.rules import RULES, local_operator, pointwise, strategies
from pipedream.sharding.rules.strategy import DivisionRule, Strategy, output_shape

R, P = Replicate(), Partial()


@pytest.mark.slow
@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", MODELS)
def test_the_operators_of_a_model_can_be_divided_so(name: str) -> None:
    for case in executed_in(traced_model(name)):
        for devices in (2, 3):
            assert list(wrong_strategies(case, devices)) == [], case.operator


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _learned(*shape: int) -> Tensor:
    return _random(*shape).requires_grad_()


def _trained(function: Callable[..., Any], *inputs: Tensor) -> Callable[[], None]:
    """The function and its backward pass, from random gradients."""

    def call() -> None:
        results = function(*inputs)
        results = results if isinstance(results, tuple | list) else (results,)
        ends = [each for each in results if each.requires_grad]
        torch.autograd.backward(ends, [torch.randn_like(each) for each in ends])

    return call


def _norm(module: nn.Module, *shape: int, training: bool = True) -> Callable[[], None]:
    return _trained(module.double().train(training), _learned(*shape))


def _picture(channels: int = 6) -> Tensor:
    return _learned(5, channels, 8, 8)


class First(nn.Sequential):
    """The first of a module's results."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self[0](x)[0]
        return result


CASES: dict[str, Callable[[], Callable[[], Any]]] = {
    "products": lambda: _trained(lambda a, b: a @ b, _learned(5, 7), _learned(7, 4)),
    "matrix and vector": lambda: _trained(lambda a, b: a @ b, _learned(5, 7), _learned(7)),
    "vectors": lambda: _trained(torch.dot, _learned(7), _learned(7)),
    "sum of vector and product": lambda: _trained(
        torch.addmv, _learned(5), _learned(5, 7), _learned(7)
    ),
    "batches of products": lambda: _trained(
        torch.baddbmm, _learned(1, 5, 4), _learned(3, 5, 7), _learned(3, 7, 4)
    ),
    "bias of one row": lambda: _trained(
        torch.addmm, _learned(1, 4), _learned(5, 7), _learned(7, 4)
    ),
    "linear": lambda: lambda: torch.ops.aten.linear(_random(2, 5, 7), _random(4, 7), _random(4)),
    "linear without bias": lambda: lambda: torch.ops.aten.linear(_random(5, 7), _random(4, 7)),
    "attention with mask": lambda: _trained(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=_random(5, 7)),
        *(_learned(2, 3, 5, 4), _learned(2, 3, 7, 4), _learned(2, 3, 7, 4)),
    ),
    "attention with a mask for each head": lambda: _trained(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=_random(1, 3, 5, 7)),
        *(_learned(2, 3, 5, 4), _learned(2, 3, 7, 4), _learned(2, 3, 7, 4)),
    ),
    "gated recurrent": lambda: _trained(First(nn.GRU(4, 6).double()), _learned(3, 5, 4)),
    "convolution": lambda: _trained(nn.Conv2d(6, 5, 3, padding=1).double(), _picture()),
    "convolution of frozen data": lambda: _trained(
        nn.Conv2d(6, 5, 3, bias=False).double(), _picture().detach()
    ),
    "groups": lambda: _trained(nn.Conv2d(6, 12, 3, groups=6).double(), _picture()),
    "two groups": lambda: _trained(nn.Conv2d(6, 4, 3, groups=2).double(), _picture()),
    "transposed": lambda: _trained(nn.ConvTranspose2d(6, 5, 3, stride=2).double(), _picture()),
    "transposed groups": lambda: _trained(
        nn.ConvTranspose2d(6, 12, 3, groups=6).double(), _picture()
    ),
    "convolution of sequences": lambda: _trained(nn.Conv1d(6, 5, 3).double(), _learned(5, 6, 9)),
    "layer norm": lambda: _norm(nn.LayerNorm((3, 4)), 2, 5, 3, 4),
    "layer norm without weight": lambda: _norm(nn.LayerNorm(4, elementwise_affine=False), 2, 5, 4),
    "layer norm without bias": lambda: _norm(nn.LayerNorm(4, bias=False), 2, 5, 4),
    "group norm": lambda: _norm(nn.GroupNorm(6, 12), 5, 12, 4, 4),
    "group norm of two groups": lambda: _norm(nn.GroupNorm(2, 4), 5, 4, 4, 4),
    "batch norm": lambda: _norm(nn.BatchNorm2d(6), 5, 6, 4, 4),
    "batch norm in evaluation": lambda: _norm(nn.BatchNorm2d(6), 5, 6, 4, 4, training=False),
    "batch norm without statistics": lambda: _norm(
        nn.BatchNorm1d(6, affine=False, track_running_stats=False), 5, 6
    ),
    "instance norm": lambda: _norm(nn.InstanceNorm2d(6, affine=True), 5, 6, 4, 4),
    "legit batch norm": lambda: (
        lambda: torch.ops.aten._native_batch_norm_legit(
            *(
                _random(5, 6, 4),
                _random(6),
                _random(6),
                _random(6),
                _random(6).exp(),
                True,
                0.1,
                1e-5,
            )
        )
    ),
    "legit batch norm without statistics": lambda: (
        lambda: torch.ops.aten._native_batch_norm_legit.no_stats(
            *(_random(5, 6, 4), _random(6), _random(6), True, 0.1, 1e-5)
        )
    ),
    "functional batch norm": lambda: (
        lambda: torch.ops.aten._native_batch_norm_legit_functional(
            *(
                _random(5, 6, 4),
                _random(6),
                _random(6),
                _random(6),
                _random(6).exp(),
                True,
                0.1,
                1e-5,
            )
        )
    ),
    "batch norm without training": lambda: (
        lambda: torch.ops.aten._native_batch_norm_legit_no_training(
            *(_random(5, 6, 4), _random(6), _random(6), _random(6), _random(6).exp(), 0.1, 1e-5)
        )
    ),
    "max pool": lambda: _trained(nn.MaxPool2d(3, 2, 1), _picture()),
    "average pool": lambda: _trained(nn.AvgPool2d(2), _picture()),
    "adaptive pools": lambda: _trained(
        lambda x: (F.adaptive_avg_pool2d(x, 3), F.adaptive_max_pool2d(x, 3)), _picture()
    ),
    "resized": lambda: _trained(
        lambda x: (
            F.interpolate(x, scale_factor=2),
            F.interpolate(x, (11, 9), mode="bilinear"),
            F.interpolate(x, (4, 5), mode="bicubic"),
        ),
        _picture(),
    ),
    "volumes": lambda: _trained(
        lambda x: (
            *(F.max_pool3d(x, 2), F.avg_pool3d(x, 2), F.adaptive_avg_pool3d(x, 3)),
            *(F.adaptive_max_pool3d(x, 3), F.interpolate(x, (5, 3, 4), mode="trilinear")),
            *(F.interpolate(x, scale_factor=2), F.pad(x, (1,) * 6, mode="replicate")),
            *(F.pad(x, (1,) * 6, mode="reflect"),),
        ),
        _learned(3, 4, 4, 4, 4),
    ),
    "sequences": lambda: _trained(
        lambda x: (
            *(F.max_pool1d(x, 2), F.avg_pool1d(x, 2), F.adaptive_avg_pool1d(x, 3)),
            *(F.interpolate(x, 5, mode="linear"), F.interpolate(x, scale_factor=2)),
            *(F.pad(x, (1, 1), mode="replicate"), F.pad(x, (1, 1), mode="reflect")),
        ),
        _learned(3, 4, 6),
    ),
    "padded": lambda: _trained(
        lambda x: (
            F.pad(x, (1, 2)),
            F.pad(x, (0, 0, 1, 1), value=2.0),
            F.pad(x, (1, 2, 3, 1), mode="reflect"),
            F.pad(x, (1, 2, 3, 1), mode="replicate"),
        ),
        _picture(),
    ),
    "embedding": lambda: _trained(
        nn.Embedding(9, 6, padding_idx=1).double(), torch.randint(0, 9, (4, 5))
    ),
    "embedding by frequency": lambda: _trained(
        nn.Embedding(9, 6, scale_grad_by_freq=True).double(), torch.randint(0, 9, (4, 5))
    ),
    "losses of classes": lambda: _trained(
        lambda x: tuple(
            F.cross_entropy(x, torch.tensor([0, 3, 1, 2, 3]), weight, reduction=reduction)
            for weight in (None, torch.rand(4, dtype=torch.float64))
            for reduction in ("none", "mean", "sum")
        ),
        _learned(5, 4),
    ),
    "losses of places": lambda: _trained(
        lambda x: tuple(
            F.cross_entropy(x, torch.randint(0, 4, (5, 3, 6)), reduction=reduction, ignore_index=2)
            for reduction in ("none", "mean", "sum")
        ),
        _learned(5, 4, 3, 6),
    ),
    "losses of numbers": lambda: _trained(
        lambda x, y: tuple(
            loss(x, y, reduction=reduction)
            for loss in (F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.soft_margin_loss, F.l1_loss)
            for reduction in ("none", "mean", "sum")
        ),
        *(_learned(5, 4), _random(5, 4)),
    ),
    "losses of probabilities": lambda: _trained(
        lambda x: tuple(
            loss(x.sigmoid(), torch.ones_like(x), reduction=reduction)
            for loss in (F.binary_cross_entropy, F.binary_cross_entropy_with_logits)
            for reduction in ("none", "mean", "sum")
        ),
        _learned(5, 4),
    ),
    "softmax": lambda: _trained(
        lambda x: (x.softmax(1), x.log_softmax(0), x.softmax(-1)), _learned(4, 5, 6)
    ),
    "activations": lambda: _trained(
        lambda x: (
            *(F.relu(x), F.gelu(x), F.gelu(x, approximate="tanh"), F.silu(x), x.tanh()),
            *(x.sigmoid(), F.elu(x), F.leaky_relu(x), F.hardswish(x), F.hardsigmoid(x)),
            *(F.mish(x), F.softplus(x), F.hardtanh(x), F.logsigmoid(x), F.relu6(x), x.abs()),
        ),
        _learned(4, 5),
    ),
    "arithmetic": lambda: _trained(
        lambda x, y: (
            *(x + y, x - y, x * y, x / y, x + 1, 1 - x, x * 2, x / 3, -x, x**2, x.exp()),
            *(x.clamp(-1, 1), torch.maximum(x, y), torch.where(x > 0, x, y), x.rsqrt(), x.clone()),
            *(torch.lerp(x, x * 2, 0.3), torch.addcmul(x, x, y), x.masked_fill(y > 0, 0.0)),
        ),
        *(_learned(4, 5, 6), _learned(5, 1)),
    ),
    "rounded quotients": lambda: (
        lambda: (
            torch.div(_random(4, 5), 0.3, rounding_mode="floor"),
            _random(4, 5).floor(),
            torch.div(_random(4, 5), _random(4, 5)),
        )
    ),
    "types": lambda: (
        lambda: (
            _random(4, 5).float().double(),
            _random(4, 5).long(),
            (_random(4, 5) > 0).double(),
            torch.ones_like(_random(4, 5)),
            _random(4, 5).bool().logical_not(),
        )
    ),
    "in place": lambda: (
        lambda: (
            _random(4, 5).add_(_random(5)),
            _random(4, 5).mul_(2),
            _random(4, 5).copy_(_random(5)),
            _random(4, 5).masked_fill_(_random(4, 5) > 0, 3.0),
            torch.zeros((), dtype=torch.int64).add_(1),
        )
    ),
    "reductions": lambda: _trained(
        lambda x: (
            *(x.sum(), x.sum(1), x.sum((0, 2), keepdim=True), x.mean(), x.mean(1), x.mean((0, -1))),
            *(x.amax(1), x.amin((0, 2)), x.max(1)[0], x.std(1), x.var(), x.logsumexp(1)),
            *(x.prod(1), x.norm(dim=1), torch.linalg.vector_norm(x, dim=(0, 1)), x.cumsum(1)),
        ),
        _learned(4, 5, 6),
    ),
    "orders": lambda: (
        lambda: (
            *(_random(4, 5).sort(1), _random(4, 5).argsort(0), _random(4, 5).topk(2)),
            *(_random(4, 5).argmax(1), _random(4, 5).argmax(), (_random(4, 5) > 0).any(1)),
            *((_random(4, 5) > 0).all(), _random(4, 5).flip(0)),
        )
    ),
    "views": lambda: (
        lambda: (
            *(_random(4, 5, 18).view(20, 18), _random(20, 18).view(4, 5, 3, 3, 2)),
            *(_random(4, 5, 18).view(4, 5, 3, 6), _random(4, 6, 3, 2).view(4, 36)),
            *(_random(4, 1, 6).squeeze(1), _random(4, 6).unsqueeze(1), _random(4, 6).view(24)),
            *(_random(4, 9).view(2, 18), _random(12, 3).view(6, 6), _random(6, 4).view(6, 4)),
            *(_random(3, 4).view(12), _random(5, 4).view(20), _random(5, 1).view(5)),
            *(_random(4, 6).reshape(2, -1), _random().view(1, 1), _random(2, 0, 3).view(6, 0)),
        )
    ),
    "transposed views": lambda: (
        lambda: (
            *(_random(4, 5).t(), _random(4).t(), _random(4, 5, 6).transpose(0, -1)),
            *(_random(4, 5, 6).permute(2, 0, 1), _random(4, 1, 6).expand(4, 5, 6)),
            *(_random(6).expand(4, -1), _random(1).expand(4)),
        )
    ),
    "pieces": lambda: _trained(
        lambda x: (
            *x.chunk(3, -1),
            *x.chunk(2, 1),
            *x.split([2, 4, 6], -1),
            *x.split([4, 4, 4], -1),
            *x.split(5, -1),
            *x.unbind(1),
            x[:, 2],
            x[:, 1:3],
            x[..., 4:8],
            x[..., ::2],
            x[:2],
        ),
        _learned(4, 5, 12),
    ),
    "put together": lambda: _trained(
        lambda x, y: (
            *(torch.cat((x, x, y), -1), torch.cat((x, y[:, :3]), 1), torch.stack((x, y), 1)),
            *(torch.stack((x, y, x)), torch.cat((x, y), 0)),
        ),
        *(_learned(4, 5), _learned(4, 5)),
    ),
    "looked up": lambda: _trained(
        lambda x: (
            x.gather(1, torch.randint(0, 5, (4, 3))),
            x.index_select(1, torch.tensor([0, 2, 2])),
        ),
        _learned(4, 5),
    ),
    "made": lambda: (
        lambda: (
            *(torch.zeros(4, 5), torch.ones(4), torch.full((4, 5), 2.0), torch.arange(6)),
            *(_random(3).new_zeros(4, 5), _random(3).new_full((4,), 1.0), torch.eye(4)),
        )
    ),
}


@pytest.mark.slow
@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", CASES)
def test_operators_of_all_kinds_can_be_divided_so(name: str) -> None:
    torch.manual_seed(0)
    for case in executed_by(CASES[name]()):
        for devices in (2, 3):
            assert list(wrong_strategies(case, devices)) == [], case.operator


def _mean_as_a_sum(operator: Operator, devices: int) -> Iterator[Strategy]:
    yield Strategy((Shard(0),), (P,))


def _softmax_everywhere(operator: Operator, devices: int) -> Iterator[Strategy]:
    yield Strategy((Shard(1),), (Shard(1),))


def _partial_bend(operator: Operator, devices: int) -> Iterator[Strategy]:
    yield Strategy((P,), (P,))


def _wrong_order(operator: Operator, devices: int) -> Iterator[Strategy]:
    yield Strategy((Shard(1),), (Shard(1),))


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda: _random(4, 6).mean(0), DivisionRule(_mean_as_a_sum)),
        (lambda: _random(4, 6).softmax(1), DivisionRule(_softmax_everywhere)),
        (lambda: _random(4, 6).relu(), DivisionRule(_partial_bend)),
        (lambda: _random(2, 6).view(3, 4), DivisionRule(_wrong_order, partial(output_shape, 1))),
        (lambda: _random(2, 6).view(2, 3, 2), DivisionRule(_wrong_order)),
    ],
)
def test_a_wrong_rule_is_noticed(call: Callable[[], Any], rule: DivisionRule) -> None:
    case = executed_by(call)[-1]
    assert list(wrong_strategies(case, 2)) == []
    assert list(wrong_strategies(case, 2, rule=rule)) != []


def _strategies_of(call: Callable[[], Any], devices: int = 2) -> set[tuple[str, str]]:
    (case,) = executed_by(call)[-1:]
    return {
        (show_placements(each.inputs), show_placements(each.outputs))
        for each in strategies(case.operator, devices)
    }


def test_strategies_of_a_product_with_bias() -> None:
    bias, first, second = _random(6), _random(4, 8), _random(8, 6)
    assert _strategies_of(lambda: torch.addmm(bias, first, second)) == {
        ("R,R,R", "R"),
        ("R,S(0),R", "S(0)"),
        ("S(0),R,S(1)", "S(1)"),
        ("P,S(1),S(0)", "P"),
        ("P,P,R", "P"),
        ("P,R,P", "P"),
    }


def test_sums_of_partial_numbers_and_constants() -> None:
    x, y = _random(4), _random(4)
    assert ("P,P", "P") in _strategies_of(lambda: x + y)
    assert ("P,R", "P") not in _strategies_of(lambda: x + y)
    assert ("P", "P") not in _strategies_of(lambda: x + 1)
    assert ("P", "P") in _strategies_of(lambda: x * 2)


def test_a_fused_projection_is_cut_in_heads() -> None:
    x = _random(2, 5, 36)
    found = _strategies_of(lambda: x.view(2, 5, 3, 6, 2))
    assert ("S(2, chunks=3)", "S(3)") in found
    assert ("S(2)", "S(3)") not in found
    assert ("S(2, chunks=3)", "S(2),S(2),S(2)") in _strategies_of(lambda: x.chunk(3, -1))
    heads = _random(2, 5, 3, 6, 2)
    assert ("S(3)", "S(2, chunks=3)") in _strategies_of(lambda: heads.view(2, 5, 36))


def test_batch_norm_adds_up_unless_channels_are_divided() -> None:
    """The third number is of what is added up within the operator."""
    executed = executed_by(_norm(nn.BatchNorm2d(6), 4, 6, 2, 2))
    forward, backward = (each for each in executed if "batch_norm" in each.operator.target)
    ways = {"R": "R", "S(0)": "P", "S(1)": "S(0)", "S(2)": "P", "S(3)": "P"}
    for case in (forward, backward):
        placed = {
            show_placements(each.inputs[:1]): show_placements((each.within,))
            for each in strategies(case.operator, 2)
        }
        assert placed == ways | ({"P": "R"} if case is backward else {})


def test_places_are_divided_where_they_are_rows() -> None:
    """Sequences keep their division when they become rows of a matrix, in a chunk each."""
    x = _random(2, 6, 5)
    assert ("S(1)", "S(0, chunks=2)") in _strategies_of(lambda: x.view(12, 5))


def test_an_uneven_number_of_heads_is_not_divided() -> None:
    """Of three heads one device would have two, but of twelve numbers each has six."""
    x = _random(2, 12)
    assert ("S(1)", "S(1)") not in _strategies_of(lambda: x.view(2, 3, 4))
    assert ("S(1)", "S(1)") in _strategies_of(lambda: x.view(2, 3, 4), devices=3)


def test_arguments_become_local() -> None:
    x = _random(2, 5, 36)
    (case,) = executed_by(lambda: x.view(2, 5, 3, 6, 2))
    strategy = Strategy((Shard(2, 3),), (Shard(3),))
    local = local_operator(case.operator, strategy, 3, 0)
    assert local.arguments[1] == (2, 5, 3, 2, 2)
    assert local.inputs[0].shape == (2, 5, 12)


def test_an_operator_without_a_rule_is_replicated() -> None:
    (case,) = executed_by(lambda: torch.linalg.inv_ex(torch.eye(4)))[-1:]
    assert case.operator.family not in RULES
    (only,) = strategies(case.operator, 2)
    assert {*only.inputs, *only.outputs} == {R}


def test_parts_too_small_for_all_devices_are_no_strategy() -> None:
    x = _random(2, 5)
    assert ("S(0)", "S(0)") not in _strategies_of(lambda: x.relu(), devices=3)
    assert ("S(1)", "S(1)") in _strategies_of(lambda: x.relu(), devices=3)


@pytest.mark.thorough
def test_all_operators_of_the_models_have_rules() -> None:
    calls = [call for name in MODELS for call in describe(traced_model(name).joint).calls]
    assert {c.operator.target for c in calls if c.operator.family not in RULES} == set()


@pytest.mark.slow
def test_a_description_survives_as_json() -> None:
    graph = describe(traced_model("transformer, separate").joint)
    assert OperatorGraph.model_validate_json(graph.model_dump_json()) == graph


def test_the_families_are_operators_of_torch() -> None:
    missing = {family for family in RULES if not hasattr(torch.ops.aten, family.split(".")[1])}
    assert missing == set()


@pytest.mark.slow
@pytest.mark.one_in(8)
@pytest.mark.parametrize("family", sorted(pointwise.rules()))
def test_pointwise_operators_by_their_schemas(family: str) -> None:
    """Every overload that can be called with numbers between 0 and 1, broadcast."""
    torch.manual_seed(0)
    packet = getattr(torch.ops.aten, family.split(".")[1])
    for name in packet.overloads():
        try:
            case = _by_schema(getattr(packet, name))
        except (RuntimeError, TypeError, KeyError):
            continue
        for devices in (2, 3):
            assert list(wrong_strategies(case, devices)) == [], case.operator


def _by_schema(operator: Any) -> Executed:
    """The second tensor is broadcast, but not that of a backward pass."""
    arguments: list[Any] = []
    for each in operator._schema.arguments:
        if each.kwarg_only or each.default_value is not None:
            break
        if str(each.type) == "Tensor":
            broadcast = len(arguments) == 1 and "backward" not in str(operator)
            arguments.append(_random(1 if broadcast else 4, 6).sigmoid())
        else:
            arguments.append({"number": 0.5, "float": 0.5, "bool": True}[str(each.type)])
    result = operator(*(x.clone() if isinstance(x, Tensor) else x for x in arguments))
    described, inputs = describe_operator(operator, arguments, {}, result)
    return Executed(described, tuple(inputs))
