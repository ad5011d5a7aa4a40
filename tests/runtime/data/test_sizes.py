"""How many examples the minibatches of an epoch have: all of them are used, once."""

from __future__ import annotations

from itertools import chain

import torch
from hypothesis import given
from hypothesis import strategies as st

from pipedream.graph.run_config import DataFactory, Factory, RunConfig
from pipedream.runtime.data.order import Sizes
from pipedream.runtime.data.reader import Epoch

COUNTS = st.integers(0, 60), st.integers(1, 20)


@given(*COUNTS)
def test_every_example_has_its_place(examples: int, batch_size: int) -> None:
    sizes = Sizes(examples, batch_size)
    counts = [sizes.of(minibatch) for minibatch in range(len(sizes))]
    assert sum(counts) == examples
    assert set(counts[:-1]) <= {batch_size}
    assert [b for b, count in enumerate(counts) if count < batch_size] == (
        [] if sizes.last is None else [sizes.last]
    )


@given(*COUNTS)
def test_or_what_does_not_fill_a_minibatch_is_left_out(examples: int, batch_size: int) -> None:
    sizes = Sizes(examples, batch_size, drop_last=True)
    counts = [sizes.of(minibatch) for minibatch in range(len(sizes))]
    assert counts == [batch_size] * (examples // batch_size)
    assert sizes.last is None


def test_an_epoch_reads_them_so() -> None:
    """Each of ten examples once; with `drop_last` two sit each epoch out, not always the same."""
    data = torch.utils.data.TensorDataset(torch.arange(10), torch.arange(10))
    config = RunConfig(
        format="pipedream-run/1",
        model=Factory(source="small_models:Chain"),
        data=DataFactory(source="small_models:regression"),
        batch_size=4,
    )

    def read(config: RunConfig, number: int) -> list[list[int]]:
        epoch = Epoch(data, config, number, torch.device("cpu"))
        return [epoch.batch(minibatch).target.tolist() for minibatch in range(len(epoch))]

    kept = [read(config, number) for number in (1, 2)]
    assert [[len(batch) for batch in epoch] for epoch in kept] == [[4, 4, 2]] * 2
    assert [sorted(chain.from_iterable(epoch)) for epoch in kept] == [list(range(10))] * 2
    dropped = [read(config.model_copy(update={"drop_last": True}), number) for number in (1, 2)]
    assert dropped == [epoch[:2] for epoch in kept]
    assert kept[0][2] != kept[1][2]
