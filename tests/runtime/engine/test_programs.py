"""Stages that run as programs learn what stages under autograd do, and keep less in between."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import small_models
import torch
from one_rank import OPTIMIZER, ROUND, Data, OneRank, Which, all_halved, none_halved, regression
from torch import Tensor, nn
from torch._dynamo.utils import counters

from pipedream.comm.buckets import Buckets
from pipedream.comm.transport import Transport
from pipedream.runtime.data.batch import Batch

EXACT = {"rtol": 0.0, "atol": 1e-12}


def made(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    return make().to(dtype)


class TiedInside(nn.Module):
    """A weight that two layers of a stage share, under a function that uses it once more."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))) @ self.b.weight)


class Twice(nn.Module):
    """One layer, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(torch.tanh(self.a(x)))))


class Chunks(nn.Module):
    """Operators of several outputs between the stages, one of which is of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 12), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.a(x).chunk(2, -1)
        values, places = self.b(first).sort(-1)
        return self.c(values) + second.gather(-1, places)


class Biases(nn.Module):
    """Two parameters with the same gradient, which is what a stage receives, and sends."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(6, 6), nn.Linear(6, 6)
        self.one, self.other = nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.zeros(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x) + self.one + self.other)


class Frozen(small_models.Chain):
    def __init__(self) -> None:
        super().__init__()
        self.a.requires_grad_(False)
        self.b.linear.weight.requires_grad_(False)


class NothingToLearn(nn.Module):
    """The second of three stages has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(torch.tanh(self.a(x))) * 2)


class DetachedLater(nn.Module):
    """No gradient comes to the second layer; a later stage than its own detaches what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.a(x))
        return self.c(first + torch.tanh(self.b(first)).detach())


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Conv1d(1, 3, 3), nn.BatchNorm1d(3), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.norm(self.a(x[:, None]))).flatten(1))


class Dropping(nn.Module):
    """Draws of several kinds: one of them depends on data, one reads a shape alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop = small_models.Layer(6), nn.Dropout(0.5)
        self.alpha, self.b = nn.AlphaDropout(0.3), small_models.Layer(6)
        self.rows, self.c = nn.Dropout1d(0.4), small_models.Layer(6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.alpha(self.drop(self.a(x)))
        x = self.rows(self.b(x)) + 0.1 * torch.rand_like(x) * torch.bernoulli(x.sigmoid())
        return self.c(x) + torch.randn(6, dtype=x.dtype)


CASES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "chain": (small_models.Chain, 3),
    "skips": (small_models.Skips, 3),
    "integers between": (small_models.Sorted, 3),
    "tied": (TiedInside, 1),
    "twice": (Twice, 1),
    "chunks": (Chunks, 2),
    "same gradient": (Biases, 4),
    "frozen": (Frozen, 3),
    "first stage frozen": (small_models.FrozenFirst, 3),
    "nothing to learn": (NothingToLearn, 4),
    "batch norm": (small_models.Normed, 3),
    "convolution": (Convolved, 2),
    "buffers": (small_models.Averaging, 3),
    "no gradient": (small_models.Aside, 3),
    "no gradient from a later stage": (DetachedLater, 2),
    "piece of a gradient": (small_models.Token, 2),
    "dropout": (Dropping, 3),
}


def assert_same(one: OneRank, other: OneRank, **close: float) -> None:
    torch.testing.assert_close(one.losses, other.losses, **close)
    torch.testing.assert_close(one.state, other.state, **close)


@pytest.mark.slow
@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_halves_as_programs_learn_what_whole_passes_under_autograd_do(
    name: str, recompute: bool
) -> None:
    """Five minibatches, two updates: with momentum and decay a gradient of zero is not none."""
    make, stages = CASES[name]
    whole = OneRank(made(make), regression(), stages, halved=none_halved)
    halves = OneRank(made(make), regression(), stages, recompute=recompute)
    assert_same(halves.train(), whole.train(), **EXACT)
    assert halves.obstacles == [None] * stages
    assert whole.obstacles == ["unused"] * stages


PLAIN = ["chain", "tied", "chunks", "convolution", "no gradient", "no gradient from a later stage"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", PLAIN)
def test_halves_learn_what_the_plain_model_does(name: str) -> None:
    make, stages = CASES[name]
    halves, model, data = (
        OneRank(made(make), regression(), stages).train(),
        made(make),
        regression(),
    )
    optimizer = torch.optim.SGD(model.parameters(), **OPTIMIZER.args)
    for first in range(0, len(data.batches), ROUND):
        batches = data.batches[first : first + ROUND]
        for each in batches:
            loss = nn.functional.mse_loss(model(*each.inputs), each.target)
            (loss / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = {n: t for n, t in model.state_dict().items() if n in halves.state}
    torch.testing.assert_close(halves.state, state, **EXACT)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["chain", "batch norm", "dropout"])
def test_a_whole_pass_of_a_worker_with_halves_is_both(name: str) -> None:
    """The first stage has halves of every other minibatch, the last one none."""
    make, stages = CASES[name]
    mixed = OneRank(made(make), regression(), stages, halved=lambda s, b: s == 0 and b % 2 == 0)
    whole = OneRank(made(make), regression(), stages, halved=none_halved)
    assert_same(mixed.train(), whole.train(), **EXACT)
    assert mixed.obstacles == [None] + ["unused"] * (stages - 1)


def test_random_numbers_are_those_of_a_pass_under_autograd_bit_for_bit() -> None:
    """Of one linear layer the outputs are the same to the last bit, and so are the masks of all
    minibatches; both epochs.
    """

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.drop, self.c = nn.Linear(6, 6), nn.Dropout(0.5), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return torch.rand_like(x) * self.drop(self.a(x))

    outputs: dict[bool, list[Tensor]] = {}
    for halves in (False, True):
        seen = outputs.setdefault(halves, [])

        def loss(output: Tensor, target: Tensor, seen: list[Tensor] = seen) -> Tensor:
            seen.append(output.detach().clone())
            return nn.functional.mse_loss(output, target)

        which = all_halved if halves else none_halved
        rank = OneRank(made(Dropped), regression(3), 1, loss, which)
        for rank.rng.epoch in (0, 1):
            rank.train()
            rank.executors[0].weights.current.number = 0
    assert len(outputs[True]) == 6
    assert all(torch.equal(*pair) for pair in zip(outputs[True][:3], outputs[False], strict=False))
    dropped = [output == 0 for output in outputs[True]]
    assert all(torch.equal(*p) for p in zip(dropped, [o == 0 for o in outputs[False]], strict=True))
    assert not torch.equal(dropped[0], dropped[1])
    assert not torch.equal(dropped[0], dropped[3])


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["chain", "convolution", "dropout", "tied", "twice"])
def test_autocast(name: str) -> None:
    """To the last bit, also where a weight is used twice: the trace casts it once, as autograd."""
    make, stages = CASES[name]
    data, dtype = regression(dtype=torch.float32), torch.float32
    whole = OneRank(made(make, dtype), data, stages, halved=none_halved, autocast="bfloat16")
    halves = OneRank(made(make, dtype), data, stages, autocast="bfloat16")
    assert_same(halves.train(), whole.train(), rtol=0.0, atol=0.0)
    lowered = [
        node
        for module in halves.modules.values()
        for node in module.program.named.program.parts.forward.module.graph.nodes  # type: ignore[union-attr]
        if torch.bfloat16 in node.args or torch.bfloat16 in node.kwargs.values()
    ]
    assert lowered
    assert halves.obstacles == [None] * stages


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("chain", "eager"),
        ("dropout", "eager"),
        ("batch norm", "aot_eager"),
        ("dropout", "aot_eager"),
        pytest.param("batch norm", "inductor", marks=pytest.mark.slow),
    ],
)
def test_compiled(name: str, backend: str) -> None:
    make, stages = CASES[name]
    whole = OneRank(made(make), regression(), stages, halved=none_halved)
    halves = OneRank(made(make), regression(), stages, backend=backend)
    counters.clear()
    assert_same(halves.train(), whole.train(), **EXACT)
    assert halves.obstacles == [None] * stages
    assert counters["stats"]["unique_graphs"] > 2 * stages


class Several(small_models.Chain):
    """Returns a tree: outputs of the first and of the last stage, integers, and one that the loss
    does not read, of a head that nothing else reads."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> dict[str, object]:  # type: ignore[override]
        first = self.a(x)
        last = self.c(self.b(first))
        return {"pair": (first, last), "order": last.argsort(1), "unread": self.head(last)}


def tree_loss(output: dict[str, tuple[Tensor, Tensor]], target: Tensor) -> Tensor:
    first, last = output["pair"]
    return nn.functional.mse_loss(last + 0.5 * first, target)


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_the_loss_of_a_tree_of_outputs(stages: int, scale: float) -> None:
    """What the loss does not read has no gradient: not even weight decay changes its head."""
    which = {"loss": tree_loss, "scale": scale}
    model = made(Several)
    before = {name: tensor.clone() for name, tensor in model.head.state_dict().items()}
    halves = OneRank(model, regression(), stages, **which)  # type: ignore[arg-type]
    whole = OneRank(made(Several), regression(), stages, halved=none_halved, **which)  # type: ignore[arg-type]
    assert_same(halves.train(), whole.train(), **EXACT)
    assert halves.obstacles == [None] * stages
    after = {name: halves.state[f"head.{name}"] for name in before}
    torch.testing.assert_close(after, before, rtol=0.0, atol=0.0)


class Flattened(nn.Module):
    """All that comes to it, forward and backward, is read in the order in which it lies."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x.view(2, 12).view(4, 6)).view(24)).view(4, 6)


def turned_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.t().contiguous(), target.t().contiguous())


def test_gradients_that_lie_in_memory_in_another_way() -> None:
    """The loss gives one that is transposed, where the trace was of one that is not."""
    halves = OneRank(made(Flattened), regression(), 2, turned_loss).train()
    whole = OneRank(made(Flattened), regression(), 2, turned_loss, none_halved).train()
    assert_same(halves, whole, **EXACT)
    assert halves.obstacles == [None] * 2


@pytest.mark.slow
def test_inputs_that_lie_in_memory_in_another_way() -> None:
    """As the first minibatch is."""

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(24, 24)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x.flatten()).view(4, 6)

    batches = [
        Batch((x if number % 2 else x.t().contiguous().t(),), each.target)
        for number, each in enumerate(regression().batches)
        for x in each.inputs
    ]
    halves = OneRank(made(Flat), Data(batches), 1).train()
    whole = OneRank(made(Flat), Data(batches), 1, halved=none_halved).train()
    assert_same(halves, whole, **EXACT)
    batches = batches[1:]
    halves = OneRank(made(Flat), Data(batches), 1).train()
    whole = OneRank(made(Flat), Data(batches), 1, halved=none_halved).train()
    assert_same(halves, whole, **EXACT)


class Words(nn.Module):
    """Reads integers, and no gradient comes to its first stage's input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Embedding(9, 6), small_models.Layer(6), small_models.Layer(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)).mean(1))


def test_inputs_of_integers() -> None:
    words = torch.arange(60).view(5, 4, 3) % 9
    batches = [
        Batch((x,), each.target) for x, each in zip(words, regression().batches, strict=True)
    ]
    whole = OneRank(made(Words), Data(batches), 3, halved=none_halved).train()
    halves = OneRank(made(Words), Data(batches), 3).train()
    assert_same(halves, whole, **EXACT)
    assert halves.obstacles == [None] * 3


def test_a_loss_without_gradient_changes_nothing() -> None:
    def nothing(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output.detach(), target)

    halves = OneRank(made(small_models.Chain), regression(), 1, nothing)
    before = copy.deepcopy(halves.state)
    torch.testing.assert_close(halves.train().state, before, rtol=0.0, atol=0.0)


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_minibatches_of_several_shapes(recompute: bool) -> None:
    """Each has a program of its own; they share the statistics of batch norm."""
    batches = [
        Batch((each.inputs[0][:count],), each.target[:count])
        for each, count in zip(regression().batches, (4, 2, 3, 4, 2), strict=True)
    ]

    def rank(which: Which) -> OneRank:
        model, options = made(small_models.Normed), {"varying": True, "recompute": recompute}
        return OneRank(model, Data(batches), 2, halved=which, **options).train()  # type: ignore[arg-type]

    halves, whole = rank(all_halved), rank(none_halved)
    assert_same(halves, whole, **EXACT)
    assert halves.obstacles == [None, None]
    forms = [form for forms in halves.forms.forms.values() for form in forms.values()]
    assert len({id(form.program.named) for form in forms}) == 2 * 3


class Done:
    def wait(self) -> None: ...


class Adding(Transport):
    """Of one replica: it notes how many gradients a bucket still waits for when a sum begins."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), "gloo")
        self.missing: list[tuple[str, int]] = []
        self.now = ""
        self.rank: OneRank | None = None

    def begin_sum(self, flat: Tensor, group: Any) -> Any:
        assert self.rank is not None
        (executor,) = self.rank.executors.values()
        assert executor.buckets is not None
        missing = sum(len(bucket.missing) for each in executor.buckets for bucket in each.buckets)
        self.missing.append((self.now, missing))
        return Done()


@pytest.mark.parametrize("which", [all_halved, none_halved])
def test_sums_over_replicas_begin_while_gradients_are_computed(which: Which) -> None:
    """A bucket for each of six parameters: the last round has two minibatches, and the second's
    gradients are sent one by one, by either path.
    """
    transport, model = Adding(), made(small_models.Chain)
    rank = OneRank(model, regression(), 1, halved=which, group="replicas", transport=transport)
    (executor,), transport.rank = rank.executors.values(), rank
    executor.buckets = (Buckets(dict(model.named_parameters()), transport, "replicas", 1),)
    rank.before = lambda action: setattr(transport, "now", str(action))
    reference = OneRank(made(small_models.Chain), regression(), 1, halved=none_halved).train()
    assert_same(rank.train(), reference, **EXACT)
    closing = ["0BW2", "0BW4@1"] if which is all_halved else ["0B2", "0B4@1"]
    assert transport.missing == [(now, left) for now in closing for left in (5, 4, 3, 2, 1, 0)]
