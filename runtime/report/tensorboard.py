"""TensorBoard logs: losses and the state of the ranks, over the minibatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pipedream.runtime.supervise.status import Status


class Board:
    """Scalars in `folder`, for `tensorboard --logdir`.

    `learning_rates` returns that of each parameter group. Steps count the minibatches of the whole
    run, also those before it was resumed.
    """

    def __init__(self, folder: Path, learning_rates: Callable[[], Sequence[float]]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder))
        self.learning_rates = learning_rates

    def loss(self, step: int, loss: float) -> None:
        self.add("loss", loss, step)

    def state(self, step: int, rate: float, statuses: Mapping[int, Status]) -> None:
        """`rate` in samples per second."""
        self.add("samples per second", rate, step)
        learning_rates = self.learning_rates()
        for group, learning_rate in enumerate(learning_rates):
            part = f"/group {group}" if len(learning_rates) > 1 else ""
            self.add(f"learning rate{part}", learning_rate, step)
        for rank, status in statuses.items():
            self.add(f"busy share/rank {rank}", status.busy, step)
            self.add(f"memory in bytes/rank {rank}", status.memory, step)

    def close(self) -> None:
        self.writer.close()

    def add(self, name: str, value: float, step: int) -> None:
        self.writer.add_scalar(name, value, step)
