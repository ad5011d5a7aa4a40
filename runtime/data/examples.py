"""The examples of a run, to train on and held out, as its minibatches."""

from __future__ import annotations

import torch

from pipedream.capture.sources.load import load_data
from pipedream.capture.sources.named_examples import input_names
from pipedream.graph.errors import UserError
from pipedream.runtime.data.order import EpochOrder
from pipedream.runtime.data.reader import Batch, Epoch
from pipedream.runtime.job import Job


class Examples:
    """`minibatches` an epoch has, of `sizes`; `held_out` is None where the source gives none.

    Raises UserError where the examples do not fill a minibatch.
    """

    def __init__(self, job: Job, device: torch.device) -> None:
        self.config, self.device = job.config, device
        self.training, self.held_out = load_data(job.config, job.directory)
        self.order = EpochOrder(self.training, job.config, job.directory)
        self.sizes = self.order.sizes
        self.minibatches = len(self.sizes)
        self.kind: str | None = None
        self.draws = False
        if self.sizes.examples < job.config.batch_size:
            raise UserError(
                f"{job.config.data.source}: {self.sizes.examples} examples do not fill a batch of "
                f"{job.config.batch_size}: choose a smaller batch_size"
            )

    @property
    def input_names(self) -> tuple[str, ...] | None:
        """What the model's inputs are called; None if they have no names."""
        return input_names(self.training, self.config.loss)

    def first(self) -> Batch:
        """The first minibatch of all; from now on the others have to be of its `kind`."""
        before = torch.get_rng_state()
        batch = self.epoch(0).batch(0)
        self.draws = not torch.equal(torch.get_rng_state(), before)
        self.kind = batch.kind
        return batch

    def epoch(self, number: int) -> Epoch:
        order = self.order(number)
        return Epoch(self.training, self.config, number, self.device, self.kind, self.draws, order)

    def to_try(self) -> Epoch:
        """The held-out examples, in their order."""
        assert self.held_out is not None
        order = range(len(self.held_out))
        return Epoch(self.held_out, self.config, 0, self.device, order=order)
