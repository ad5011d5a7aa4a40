"""The examples of a run, to train on and held out, as its minibatches."""

from __future__ import annotations

import torch

from pipedream.capture.sources.load import load_data
from pipedream.capture.sources.named_examples import input_names
from pipedream.capture.sources.streams import stream_of
from pipedream.graph.errors import UserError
from pipedream.runtime.data.batch import Batch
from pipedream.runtime.data.order import EpochOrder
from pipedream.runtime.data.reader import Epoch
from pipedream.runtime.run.job import Job


class Examples:
    """Loads the examples: an epoch has `minibatches`, of `sizes`; `held_out` is None where the
    source gives none.

    Raises UserError where the examples do not fill a minibatch.
    """

    def __init__(self, job: Job, device: torch.device) -> None:
        self.config, self.device = job.config, device
        self.training, self.held_out = load_data(job.config, job.directory)
        self.stream = stream_of(self.training)
        if self.stream is not None and job.config.data_workers:
            raise UserError(
                f"data_workers: {job.config.data.source} gives a stream, which each rank reads by"
                " itself: write data_workers: 0"
            )
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
        """Returns the first minibatch of all; from now on the others have to be of its `kind`."""
        before = torch.get_rng_state()
        batch = self.epoch(0).batch(0)
        # A stream has random numbers of its own, which take the place of torch's while it is read.
        drawn = not torch.equal(torch.get_rng_state(), before)
        self.draws = drawn or self.stream is not None
        self.kind = None if self.config.data.varying else batch.kind
        return batch

    def epoch(self, number: int) -> Epoch:
        order = self.order(number)
        if self.stream is not None:
            self.stream.begin(number)
        return Epoch(self.training, self.config, number, self.device, self.kind, self.draws, order)

    def to_try(self) -> Epoch:
        """Returns the held-out examples, in their order."""
        assert self.held_out is not None
        order = range(len(self.held_out))
        return Epoch(self.held_out, self.config, 0, self.device, order=order)
