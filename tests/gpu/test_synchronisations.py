"""A minibatch that trains on a GPU has the host wait for it nowhere."""

from __future__ import annotations

from typing import Any

import pytest
import small_models
import torch
from one_rank import OneRank, none_halved, regression
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn.functional import mse_loss
from torch.profiler import ProfilerActivity, profile, record_function

from pipedream.comm.device.host_copy import HostCopy
from pipedream.graph.run_config import DataFactory, Factory, RunConfig
from pipedream.runtime.data.reader import Epoch, Reader

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]
WAITS = {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"}
GPU = torch.device("cuda", 0)
DATA = regression()


class Examples:
    """Those of the minibatches of DATA, one after the other."""

    def __len__(self) -> int:
        return 4 * len(DATA.batches)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        batch = DATA.batches[index // 4]
        return batch.inputs[0][index % 4], batch.target[index % 4]


def reader() -> Reader:
    config = RunConfig(
        format="pipedream-run/1",
        model=Factory(source="a:b"),
        data=DataFactory(source="a:b"),
        batch_size=4,
        dtype="float64",
    )
    epoch = Epoch(Examples(), config, 0, GPU, draws=False, order=range(len(Examples())))
    return Reader(epoch, range(len(DATA.batches)))


def of_three(output: Tensor, target: Tensor) -> Tensor:
    return mse_loss(output, target[:, :3])


def waits(recorded: profile) -> list[str]:
    """Returns the calls of CUDA that wait, in what is called training: profiling ends in one."""
    events = recorded.events()
    assert events is not None
    host = [each for each in events if each.device_type == DeviceType.CPU]
    (training,) = [each.time_range for each in host if each.name == "training"]
    assert any(each.name.startswith("cudaLaunch") for each in host), "nothing was seen"
    return [
        each.name
        for each in host
        if each.name in WAITS and training.start <= each.time_range.start <= training.end
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"halved": none_halved},
        {"halved": none_halved, "recompute": True},
        {"halved": none_halved, "autocast": "bfloat16"},
        {"halved": none_halved, "clip_norm": 0.1},
        {},
    ],
    ids=["whole", "recomputed", "bfloat16", "clipped", "in halves"],
)
def test_the_host_waits_for_the_gpu_nowhere(options: dict[str, Any]) -> None:
    """From the minibatch that is read to the loss on its way to rank 0."""
    torch.cuda.set_device(GPU)
    model = small_models.Noisy().double()
    trained = OneRank(model, DATA, loss=of_three, device=GPU, **options)
    losses: dict[int, HostCopy] = {}
    for executor in trained.executors.values():
        executor.on_loss = lambda b, loss: losses.__setitem__(b, HostCopy.begin(loss))
    with reader() as data:  # loads kernels, and takes memory
        trained.train(data)
    torch.cuda.synchronize(GPU)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with (
        reader() as data,
        profile(activities=activities) as recorded,
        record_function("training"),
    ):
        trained.train(data)
    assert waits(recorded) == []
    assert all(loss.wait().isfinite() for loss in losses.values())
    assert len(losses) == len(DATA.batches)


def test_a_wait_is_seen() -> None:
    """Else the test above might see none at all."""
    tensor = torch.ones(2, device=GPU)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as recorded, record_function("training"):
        (tensor + 1).sum().item()
    assert "cudaStreamSynchronize" in waits(recorded)
