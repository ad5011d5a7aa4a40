"""What a stage that runs as programs holds of a minibatch between the halves."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import small_models
import torch
from one_rank import OneRank, regression
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from pipedream.runtime.engine.minibatch_state import MinibatchState
from pipedream.runtime.engine.passes import ProgramPasses
from pipedream.schedule.action import Action, Kind


class Squares(nn.Module):
    """The gradient of a square needs what went in; those of the layers' weights do not."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 7), nn.Linear(7, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = self.b(x * x)
        return self.c(x * x)


def storages(tensors: Iterable[Tensor]) -> dict[int, StorageWeakRef]:
    """By address."""
    parts = (tensor.untyped_storage() for tensor in tensors)
    return {part.data_ptr(): StorageWeakRef(part) for part in parts}


def program_passes(state: MinibatchState) -> ProgramPasses:
    assert isinstance(state.passes, ProgramPasses)
    return state.passes


class Watch:
    """Notes what of a minibatch lives after the first half in each stage."""

    def __init__(self, rank: OneRank) -> None:
        self.rank, rank.after = rank, self.after
        self.before: dict[tuple[int, int], dict[int, StorageWeakRef]] = {}
        self.freed: dict[int, int] = {}
        self.sizes: dict[int, list[int]] = {}

    def after(self, action: Action) -> None:
        executor = self.rank.executors[action.stage]
        if action.kind is Kind.FORWARD:
            state = executor.states[action.minibatch]
            assert bool(self.saved(state)) == (not executor.recompute)
            held = [*self.saved(state), *state.received.values()]
            self.before[action.stage, action.minibatch] = storages(held)
        elif action.kind is Kind.BACKWARD_INPUT:
            self.between(action, executor.states[action.minibatch])
        elif action.kind is Kind.BACKWARD_WEIGHT:
            state = executor.states.get(action.minibatch, MinibatchState())
            assert state.passes is None
            assert not self.lasting(action, ())

    def saved(self, state: MinibatchState) -> list[Tensor]:
        return list(program_passes(state).saved.values()) if state.passes else []

    def kept(self, state: MinibatchState) -> list[Tensor]:
        kept = state.passes and program_passes(state).kept
        return list(kept.values.values()) if kept else []

    def between(self, action: Action, state: MinibatchState) -> None:
        assert not self.saved(state)
        assert not program_passes(state).gradients
        assert not state.received
        kept = self.kept(state)
        assert not self.lasting(action, [*kept, *state.gradients.values()])
        memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
        self.sizes[action.stage] = sorted(size // 8 for size in memory.values())

    def lasting(self, action: Action, expected: Iterable[Tensor]) -> list[int]:
        """What was there after the forward pass, lives, and is neither expected nor to stay."""
        module = self.rank.modules[action.stage].piece.module
        data = (t for each in self.rank.data.batches for t in (*each.inputs, each.target))
        state = [*module.parameters(), *module.buffers()]
        elsewhere = [  # what a stage sends, one of the same rank reads
            tensor
            for stage, executor in self.rank.executors.items()
            for number, other in executor.states.items()
            if (stage, number) != (action.stage, action.minibatch)
            for tensor in (*self.saved(other), *self.kept(other), *other.gradients.values())
        ]
        staying = storages([*expected, *data, *state, *elsewhere])
        before = self.before[action.stage, action.minibatch]
        alive = [key for key, each in before.items() if not each.expired()]
        self.freed[action.stage] = len(before) - len(alive)
        return [key for key in alive if key not in staying]


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_between_the_halves_there_is_what_the_gradients_of_the_weights_need(
    recompute: bool,
) -> None:
    """Of each layer what went in, and the gradient of what came out. The first stage has nothing
    to compute before: it holds all that a whole pass needs.
    """
    torch.manual_seed(3)
    rank = OneRank(Squares().double(), regression(), 3, recompute=recompute)
    watch = Watch(rank)
    rank.train()
    assert watch.sizes[1] == [4 * 7, 4 * 8]
    assert watch.sizes[2] == [4 * 6, 4 * 8]
    assert watch.freed[1] > 0


@pytest.mark.parametrize("model", [Squares, small_models.Skips, small_models.Normed])
def test_all_else_is_freed_in_each_of_several_stages(model: type[nn.Module]) -> None:
    torch.manual_seed(3)
    rank = OneRank(model().double(), regression(), 2)
    watch = Watch(rank)
    rank.train()
    assert sorted(watch.sizes) == [0, 1]


class Layers(nn.Module):
    """What a stage receives goes into its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)))


@pytest.mark.parametrize(("model", "stages", "staying"), [(Squares, 3, 0), (Layers, 2, 1)])
def test_memory_of_messages_is_given_back_as_soon_as_it_is_not_needed(
    model: type[nn.Module], stages: int, staying: int
) -> None:
    torch.manual_seed(3)
    rank = OneRank(model().double(), regression(), stages)
    left: dict[Kind, set[int]] = {Kind.FORWARD: set(), Kind.BACKWARD_INPUT: set()}

    def after(action: Action) -> None:
        if action.stage == 1 and action.kind in left:
            state = rank.executors[action.stage].states[action.minibatch]
            left[action.kind].add(len(state.messages))

    rank.after = after
    rank.train()
    assert left == {Kind.FORWARD: {1}, Kind.BACKWARD_INPUT: {staying}}
