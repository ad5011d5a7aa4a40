"""Folders of torch.distributed.checkpoint: written by a run for a loop, and by a loop for a run."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small_models
import torch
import torch.distributed.checkpoint as dcp
import yaml
from commands import typed
from plans import cut, make_plan
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from training import losses, run_jobs, weights

from pipedream.capture.export import capture
from pipedream.graph.errors import UserError
from pipedream.graph.plan import write_plan
from pipedream.graph.run_config import (
    DataFactory,
    Factory,
    OptimizerConfig,
    RunConfig,
    SchedulerConfig,
)
from pipedream.runtime.checkpoint.dcp import Folder
from pipedream.runtime.checkpoint.files import latest, load_optimizer
from pipedream.runtime.run.job import Job

SUPPORT = Path(small_models.__file__).parent
MICROBATCHES = 4
CONFIG = RunConfig(
    format="pipedream-run/1",
    model=Factory(source="small_models:Tied"),
    data=DataFactory(source="small_models:regression"),
    sampler=Factory(source="torch.utils.data:SequentialSampler"),
    loss="mse_loss",
    optimizer=OptimizerConfig(name="AdamW", args={"lr": 0.05}),
    batch_size=4,
    microbatches=MICROBATCHES,
    dtype="float64",
)


def job(folder: Path, replicas: tuple[int, ...] = (1, 1), **options: Any) -> Job:
    graph = capture(small_models.Tied(), (torch.randn(4, 6),)).graph
    plan = make_plan(graph, cut(graph, len(replicas)), replicas, "flush")
    made = Job(plan, CONFIG, SUPPORT, folder, schedule="flush", evaluate=False)
    return replace(made, **options)


def loop() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = small_models.Tied().double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def epoch(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """One epoch of the plain model with the updates of flush; the loss of each minibatch."""
    dataset, _ = small_models.regression()
    x, y = dataset[:]
    found = []
    for first in range(0, len(x), CONFIG.batch_size):
        part = slice(first, first + CONFIG.batch_size)
        loss = nn.functional.mse_loss(model(x[part]), y[part])
        (loss / MICROBATCHES).backward()
        found.append(loss.item())
        if len(found) % MICROBATCHES == 0:
            optimizer.step()
            optimizer.zero_grad()
    return found


def named(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}


def saved(state: dict[str, Any], folder: Path) -> Path:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.slow
def test_a_plain_loop_takes_what_a_pipeline_exports(tmp_path: Path) -> None:
    """All weights and the optimizer's state bit for bit, at the rate where the scheduler is."""
    scheduler = SchedulerConfig(name="StepLR", args={"step_size": 1, "gamma": 0.5})
    config = CONFIG.model_copy(update={"scheduler": scheduler, "epochs": 2})
    target = tmp_path / "trained.dcp"
    trained = job(tmp_path / "run", config=config, epochs=2, export=target)
    run_jobs([trained])
    model, optimizer = loop()
    state = named(model, optimizer)
    dcp.load(state, checkpoint_id=target, no_dist=True)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])
    for name, tensor in weights(trained).items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert torch.equal(model.state_dict()["c.linear.weight"], weights(trained)["a.linear.weight"])
    newest, parameters = latest(trained.checkpoints), dict(model.named_parameters())
    assert newest is not None
    remembered = load_optimizer(newest, parameters)
    assert len(remembered) == 3 * len(parameters)
    for key, tensor in remembered.items():
        name, _, part = key.rpartition("/")
        assert torch.equal(optimizer.state[parameters[name]][part], tensor)
    assert optimizer.param_groups[0]["lr"] == 0.05 * 0.5**2
    assert optimizer.param_groups[0]["fused"] is None


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("with_optimizer", [True, False])
def test_a_run_goes_on_from_a_plain_loop_as_the_loop_would(
    with_optimizer: bool, tmp_path: Path
) -> None:
    model, optimizer = loop()
    epoch(model, optimizer)
    state = named(model, optimizer)
    folder = saved(state if with_optimizer else {"model": state["model"]}, tmp_path / "loop")
    if not with_optimizer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    two, three = (
        job(tmp_path / name, replicas, init=folder)
        for name, replicas in (("two", (1, 1)), ("three", (2, 1)))
    )
    run_jobs([two, three])
    expected = epoch(model, optimizer)
    for trained in (two, three):
        assert losses(trained) == pytest.approx(expected, rel=1e-12)
        for name, tensor in weights(trained).items():
            torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("place", ["", "app"])
def test_names_may_stand_anywhere(place: str, tmp_path: Path) -> None:
    """Such as in torch's tutorial."""
    model, optimizer = loop()
    epoch(model, optimizer)
    state = named(model, optimizer)
    folder = Folder(saved({place: state} if place else state, tmp_path / "saved"))
    into = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    folder.load_model(into)
    assert all(torch.equal(into[name], tensor) for name, tensor in model.state_dict().items())
    known = folder.load_optimizer(name for name, _ in model.named_parameters())
    assert len(known) == 3 * len(list(model.parameters()))
    for key, tensor in known.items():
        name, _, part = key.rpartition("/")
        assert torch.equal(optimizer.state[model.get_parameter(name)][part], tensor)


def test_the_state_dict_alone_of_a_parallel_model(tmp_path: Path) -> None:
    model, _ = loop()
    state = {f"module.{name}": tensor.float() for name, tensor in model.state_dict().items()}
    folder = Folder(saved(state, tmp_path / "saved"))
    into = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    folder.load_model(into)
    assert all(torch.equal(into[name], state[f"module.{name}"].double()) for name in into)
    assert folder.load_optimizer(into) == {}


def refusal(path: Path) -> str:
    """What is said of beginning with this folder."""
    with pytest.raises(UserError) as refused:
        read(path)
    message = refused.value.format_message()
    assert "\n" not in message
    return message.removeprefix(str(path))


def read(path: Path) -> None:
    folder, parameters = Folder(path), dict(loop()[0].named_parameters())
    folder.load_model(parameters)
    folder.load_optimizer(parameters)


def test_folders_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model, optimizer = loop()
    epoch(model, optimizer)
    state, weights = named(model, optimizer), model.state_dict()
    (tmp_path / "empty").mkdir()
    assert "it has no .metadata" in refusal(tmp_path / "empty")
    other = saved({"model": small_models.Noisy().state_dict()}, tmp_path / "other")
    assert "there is no b.linear.weight in it" in refusal(other)
    wide = saved(weights | {"b.linear.bias": torch.zeros(7)}, tmp_path / "wide")
    assert refusal(wide) == ": b.linear.bias has the shape [7], and in the model it is [6]"
    twice = saved({"student": weights, "teacher": weights}, tmp_path / "twice")
    assert "it has several such models, student., teacher.:" in refusal(twice)
    numbered = saved({"model": weights, "optim": optimizer.state_dict()}, tmp_path / "numbered")
    assert "has numbers and no names of parameters" in refusal(numbered)
    both = saved(state | {"second": state["optim"]}, tmp_path / "both")
    assert "it has several optimizers, optim.state., second.state.;" in refusal(both)


@pytest.mark.slow
def test_a_command_that_cannot_begin_says_so_in_a_line(tmp_path: Path) -> None:
    model = small_models.Tied().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    epoch(model, optimizer)
    saved(named(model, optimizer), tmp_path / "sgd")
    write_plan(job(tmp_path).plan, tmp_path / "plan.json")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(CONFIG.model_dump(mode="json")))
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").touch()
    for words, problem in (
        (["--init", "sgd"], "remembers momentum_buffer, and AdamW of the run config exp_avg, "),
        (["--init", "sgd", "--dry-run"], "or add --no-init-optimizer"),
        (["--init", "sgd", "--resume"], "leave --init or --resume out"),
        (["--init", "full"], "it has no .metadata"),
        (["--no-init-optimizer"], "give --init, a folder to begin with"),
        (["--export", "full"], "this folder has files in it"),
        (["--export", "full/../full"], "this folder has files in it"),
    ):
        command = ["pd-train", "plan.json", "--config", "run.yaml", "-o", "run", *words]
        done = typed(tmp_path, command, {"PYTHONPATH": str(SUPPORT)})
        assert done.code == 2
        (line,) = [line for line in done.error.splitlines() if "rror: " in line or problem in line]
        assert problem in line
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine"]


class Harm:
    def __reduce__(self) -> Any:
        return os.system, ("touch harm",)


CHANGES_A_CLASS = pickle.dumps(Metadata)[:-1] + b"N}\x8c\x07versionK\x01s\x86b."
"""Sets an attribute of a class that an index may name."""


def test_nothing_in_a_folder_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index is a pickle, and torch unpickles entries of bytes, too."""
    monkeypatch.chdir(tmp_path)
    model, _ = loop()
    path = saved({"model": model.state_dict()}, tmp_path / "saved")
    whole = dcp.FileSystemReader(path).read_metadata()

    def refused(index: Any) -> str:
        data = index if isinstance(index, bytes) else pickle.dumps(index)
        (path / ".metadata").write_bytes(data)
        return refusal(path)

    assert "it names posix.system, which an index does not need" in refused(Harm())
    assert "it names posix.system" in refused(replace(whole, planner_data=Harm()))
    assert "it changes what is no object of an index" in refused(CHANGES_A_CLASS)
    assert Metadata.version is None
    assert "it has a dict, not an index" in refused({})
    stored = {key: _StorageInfo("../elsewhere", 0, 9) for key in whole.storage_data}
    assert "'../elsewhere' is not the name of a file" in refused(
        replace(whole, storage_data=stored)
    )
    entries = {**whole.state_dict_metadata, "model.b.linear.weight": BytesStorageMetadata()}
    (file,) = path.glob("*.distcp")
    file.write_bytes(pickle.dumps(Harm()))
    assert "there is no b.linear.weight" in refused(replace(whole, state_dict_metadata=entries))
    assert "torch cannot read this as a checkpoint: " in refused(whole)
    assert not (tmp_path / "harm").exists()
