"""PipelineStrategy on two ranks: a run goes on from a checkpoint as if it had not stopped."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import cut, make_plan
from processes import free_port, run_processes
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from pipedream.capture.errors.user_code import import_torchvision
from pipedream.capture.export import capture
from pipedream.comm.rank_info import RankInfo
from pipedream.graph.errors import UserError


def _net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def _loader() -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(2)
    x, y = torch.randn(24, 6, generator=draw), torch.randint(3, (24,), generator=draw)
    return DataLoader(TensorDataset(x, y), batch_size=8)


def _fit(rank: int, ranks: int, plan: Any, folder: Path, port: int) -> Any:
    """Losses of two epochs, of the second from a checkpoint after the first, and what is said of
    precision="bf16-mixed".
    """
    os.environ |= RankInfo(rank, ranks, rank, ranks, "127.0.0.1", port).variables()
    import_torchvision()
    import lightning
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    from pipedream.adapters.lightning import Pipeline, PipelineStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses, self.tried = _net(), [], []

        def configure_model(self) -> None:
            self.pipeline = Pipeline(self.net, plan, "cross_entropy", device="cpu")

        def training_step(self, batch: Any, _: int) -> Any:
            loss = self.pipeline(batch[0], target=batch[1])
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.tried.append(self.pipeline(batch[0], target=batch[1]).item())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    def trainer(epochs: int, **more: Any) -> Any:
        strategy = PipelineStrategy(cluster_environment=TorchElasticEnvironment())
        return lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            max_epochs=epochs,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            num_sanity_val_steps=0,
            gradient_clip_val=0.5,
            **more,
        )

    whole, first, second = Module(), Module(), Module()
    trainer(2).fit(whole, _loader(), _loader())
    begun = trainer(1)
    begun.fit(first, _loader())
    begun.save_checkpoint(folder / "one.ckpt")
    trainer(2).fit(second, _loader(), ckpt_path=str(folder / "one.ckpt"))
    with pytest.raises(UserError) as error:
        trainer(1, precision="bf16-mixed").fit(Module(), _loader())
    return whole.losses, first.losses + second.losses, whole.tried, error.value.format_message()


def _plain() -> tuple[list[float], list[float]]:
    net = _net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    losses, tried = [], []
    for _ in range(2):
        for x, y in _loader():
            loss = F.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
        with torch.no_grad():
            tried += [F.cross_entropy(net(x), y).item() for x, y in _loader()]
    return losses, tried


def _two(_: int, __: int, plan: Any, folder: Path, port: int) -> list[Any]:
    """What two ranks come to, forked off this process: the imports take seconds."""
    import_torchvision()
    import pipedream.adapters.lightning  # noqa: F401

    return run_processes(_fit, 2, plan, folder, port, seconds=250.0, fork=True)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_checkpoint_has_the_optimizer_states_of_all_ranks(tmp_path: Path) -> None:
    """The other ranks went on with the state of rank 0: none for their own parameters."""
    graph = capture(_net(), (torch.randn(8, 6),)).graph
    plan = make_plan(graph, cut(graph, 2), (1, 1), "flush")
    losses, tried = _plain()
    (results,) = run_processes(_two, 1, plan, tmp_path, free_port(), seconds=280.0)
    for whole, resumed, seen, said in results:
        assert whole == pytest.approx(losses, abs=1e-6)
        assert resumed == pytest.approx(losses, abs=1e-6)
        assert seen == pytest.approx(tried, abs=1e-6)
        assert "give it autocast='bfloat16' when you make it" in said
