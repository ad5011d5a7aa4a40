"""Data that press Ctrl-C while they are read, and then take their time."""

from __future__ import annotations

import os
import signal
import threading
import time

from small_models import regression
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset


class Interrupting(Dataset[tuple[Tensor, ...]]):
    """Each process that reads so many of the examples gets a SIGUSR1, as srun passes it on.

    All later ones are slow: the run is to be stopped long before the epoch is over.
    """

    def __init__(self, examples: TensorDataset, after: int) -> None:
        self.examples, self.after, self.read = examples, after, 0
        self.reading = threading.Lock()

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        with self.reading:
            self.read += 1
        if self.read == self.after:
            os.kill(os.getpid(), signal.SIGUSR1)
        if self.read >= self.after:
            time.sleep(0.01)
        return self.examples[index]


def interrupting(examples: int, after: int) -> tuple[Interrupting, None]:
    """`regression`, in the same order."""
    return Interrupting(regression(examples)[0], after), None


def interrupting_trial(examples: int, after: int) -> tuple[TensorDataset, Interrupting]:
    """`regression`, with held-out data that interrupt."""
    return regression(examples)[0], Interrupting(regression(after + 150)[0], after)
