"""Checkpoints come back whole under other stages; broken ones are refused in one line."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from pipedream.graph.errors import UserError
from pipedream.runtime.checkpoint.files import (
    copied,
    keep_newest,
    latest,
    load_all,
    load_model,
    load_optimizer,
    publish,
    read_state,
    write_stage,
)
from pipedream.runtime.checkpoint.saver import Saver
from pipedream.runtime.run.training_segment import Position


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 2, bias=False)


STAGES = (("first",), ("norm", "second"))


def tensors_of(model, modules):
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: t for name, t in state.items() if name.partition(".")[0] in modules}


def write(folder, epoch, stage, stages, model, optimizer):
    position = Position(epoch)
    write_stage(folder, position, stage, stages, copied(model), copied(optimizer))


def save(folder, model, epoch=1, stages=STAGES, **kwargs):
    for stage, modules in enumerate(stages):
        tensors = tensors_of(model, modules)
        optimizer = {f"{name}/momentum_buffer": t * 2 for name, t in tensors.items()}
        optimizer |= {f"{name}/step": torch.tensor(7) for name in tensors}
        write(folder, epoch, stage, len(stages), tensors, optimizer)
    return publish(folder, Position(epoch), len(stages), **kwargs)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model().double()


def test_the_plain_model_loads_it(tmp_path, model):
    path = save(tmp_path, model)
    other = Model().double()
    other.load_state_dict(load_all(path))
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)


def test_layout_is_hugging_faces(tmp_path, model):
    path = save(tmp_path, model, epoch=3)
    assert sorted(file.name for file in path.iterdir()) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "optimizer",
        "state.json",
    ]
    assert path.name == "epoch-0003"
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["second.weight"] == "model-00002-of-00002.safetensors"
    parameters = sum(t.nbytes for t in tensors_of(model, ("first", "norm", "second")).values())
    assert index["metadata"]["total_size"] == parameters


def test_other_stages_may_load_it(tmp_path, model):
    """Saved from two stages, loaded by one that holds the end of the first and half the second."""
    path = save(tmp_path, model)
    mine = {n: torch.empty_like(t) for n, t in tensors_of(model, ("first", "norm")).items()}
    load_model(path, mine)
    assert all(torch.equal(mine[n], t) for n, t in tensors_of(model, ("first", "norm")).items())
    state = load_optimizer(path, ["first.weight", "norm.weight"])
    assert set(state) == {
        f"{n}/{s}" for n in ("first.weight", "norm.weight") for s in ("step", "momentum_buffer")
    }
    assert state["first.weight/step"].item() == 7
    assert torch.equal(state["first.weight/momentum_buffer"], model.first.weight.detach() * 2)


def test_tied_and_overlapping_tensors(tmp_path):
    """Weights that two stages hold stand once in the index; views are saved as what they show."""
    flat = torch.arange(6.0)
    views = {"a": flat[:4].view(2, 2), "b": flat[4:], "c": flat, "d": flat.expand(2, 6)}
    write(tmp_path, 1, 0, 2, views, {})
    write(tmp_path, 1, 1, 2, {"a": views["a"]}, {})
    path = publish(tmp_path, Position(1), 2)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["a"] == "model-00001-of-00002.safetensors"
    assert index["metadata"]["total_size"] == 4 * (4 + 2 + 6 + 12)
    assert all(torch.equal(load_all(path)[name], tensor) for name, tensor in views.items())


def test_a_stage_without_parameters(tmp_path):
    write(tmp_path, 1, 0, 1, {}, {})
    path = publish(tmp_path, Position(1), 1)
    assert load_all(path) == {} == load_optimizer(path, [])


def test_latest_is_a_whole_one(tmp_path, model):
    assert latest(tmp_path) is None
    assert latest(tmp_path / "nowhere") is None
    for epoch in (2, 9, 10):
        save(tmp_path, model, epoch)
        assert (tmp_path / "latest").resolve() == tmp_path / f"epoch-{epoch:04}"
    write(tmp_path, 11, 0, 2, tensors_of(model, ("first",)), {})
    (tmp_path / "epoch-best").mkdir()
    found = latest(tmp_path)
    assert found == tmp_path / "epoch-0010"
    assert read_state(found).epoch == 10


def test_minibatches_of_an_epoch_come_between_the_epochs(tmp_path):
    positions = [Position(2), Position(2, 40), Position(2, 1_000_000), Position(3)]
    assert [str(position) for position in positions[:2]] == ["epoch-0002", "epoch-0002-000040"]
    for position in positions:
        write_stage(tmp_path, position, 0, 1, {}, {})
        path = publish(tmp_path, position, 1, training={"rate": 0.1 + 0.2})
        assert latest(tmp_path) == path
        state = read_state(path)
        assert (state.position, state.training) == (position, {"rate": 0.1 + 0.2})


def test_only_the_newest_are_kept(tmp_path, model):
    for epoch in (1, 2, 3):
        save(tmp_path, model, epoch)
    (tmp_path / "epoch-0001.old").mkdir()  # from a run that was stopped while it deleted
    keep_newest(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "epoch-0002",
        "epoch-0003",
        "latest",
    ]
    keep_newest(tmp_path, 5)
    assert latest(tmp_path) == tmp_path / "epoch-0003" == (tmp_path / "latest").resolve()


def test_a_copy_is_not_touched_by_later_updates(model):
    copy = copied({"w": model.first.weight.t()})["w"]
    expected = model.first.weight.detach().t().clone()
    with torch.no_grad():
        model.first.weight.add_(1)
    assert torch.equal(copy, expected)
    assert copy.is_contiguous()


def test_remains_of_a_stopped_run_do_not_get_in(tmp_path, model):
    write(tmp_path, 1, 2, 3, {"stale": torch.ones(1)}, {})
    (tmp_path / "epoch-0001.partial" / "model-00001-of-00002.safetensors").write_bytes(b"half")
    path = save(tmp_path, model)
    assert "stale" not in load_all(path)
    assert len(list(path.iterdir())) == 5
    assert not (tmp_path / "epoch-0001.partial").exists()


def test_what_was_never_published_goes_with_the_next_checkpoint(tmp_path, model):
    """With other --save-every a run comes to other positions: such folders stayed for ever."""
    for position in (Position(0, 40), Position(1), Position(1, 40)):
        write_stage(tmp_path, position, 0, 2, {"w": torch.ones(1)}, {})
    save(tmp_path, model, epoch=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "epoch-0001",
        "epoch-0001-000040.partial",  # another stage may be that far already
        "latest",
    ]


def test_a_second_run_takes_the_place_of_the_first(tmp_path, model):
    save(tmp_path, model, stages=(("first",), ("norm",), ("second",)))
    with torch.no_grad():
        model.first.weight.fill_(5)
    path = save(tmp_path, model, details={"schedule": "flush"})
    assert load_all(path)["first.weight"].unique().tolist() == [5]
    assert len(list(path.iterdir())) == 5
    assert read_state(path).details == {"schedule": "flush"}


# What is broken ------------------------------------------------------------------------------


def cut_short(path):
    file = path / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    return file


def not_safetensors(path):
    file = path / "model-00001-of-00002.safetensors"
    file.write_bytes(b"PK\x03\x04 a pickle, perhaps")
    return file


def missing_shard(path):
    file = path / "model-00001-of-00002.safetensors"
    file.unlink()
    return file


def missing_index(path):
    file = path / "model.safetensors.index.json"
    file.unlink()
    return file


def broken_index(path):
    file = path / "model.safetensors.index.json"
    file.write_text(file.read_text()[:40])
    return file


def index_that_leads_elsewhere(path):
    file = path / "model.safetensors.index.json"
    file.write_text(file.read_text().replace("model-00001", "../model-00001"))
    return file


def index_that_promises_too_much(path):
    file = path / "model.safetensors.index.json"
    text = file.read_text().replace(
        '"second.weight": "model-00002', '"second.weight": "model-00001'
    )
    file.write_text(text)
    return path / "model-00001-of-00002.safetensors"


@pytest.mark.parametrize(
    "harm",
    [
        cut_short,
        not_safetensors,
        missing_shard,
        missing_index,
        broken_index,
        index_that_leads_elsewhere,
        index_that_promises_too_much,
    ],
)
def test_broken_files_are_named(tmp_path, model, harm):
    path = save(tmp_path, model)
    culprit = harm(path)
    with pytest.raises(UserError) as caught:
        load_all(path)
    message = str(caught.value)
    assert message.startswith(f"{culprit}:")
    assert "\n" not in message


def test_another_model_is_named(tmp_path, model):
    path = save(tmp_path, model)
    shard = path / "model-00001-of-00002.safetensors"
    with pytest.raises(UserError) as caught:
        load_model(path, {"first.weight": torch.empty(4, 5).double()})
    assert str(caught.value) == (
        f"{shard}: first.weight is 4 x 3 of float64, in the model it is 4 x 5 of float64"
    )
    with pytest.raises(UserError, match="4 x 3 of float64, in the model it is 4 x 3 of float32"):
        load_model(path, {"first.weight": torch.empty(4, 3)})
    with pytest.raises(UserError, match=r"there is no third\.weight in it"):
        load_model(path, {"third.weight": torch.empty(1)})


def test_another_format_is_named(tmp_path, model):
    path = save(tmp_path, model)
    (path / "state.json").write_text('{"format": "pipedream-checkpoint/9", "epoch": 1}')
    with pytest.raises(UserError, match=r"state\.json:1: format"):
        read_state(path)


def test_a_disk_that_refuses(tmp_path, model):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written: Not a directory"):
        save(tmp_path / "file" / "checkpoints", model)


def test_a_checkpoint_waits_for_the_records(tmp_path):
    """Else a run that is killed right after it lacks the losses of minibatches it never repeats."""
    recorded = threading.Event()
    saver = Saver(
        folder=tmp_path,
        stages=1,
        store=HashStore(),
        publishes=True,
        timeout=30,
        recorded=lambda position: recorded.is_set(),
    )
    saver.begin(Position(0, 8), {0: ({"w": torch.ones(2)}, {})}, {})
    time.sleep(0.2)
    assert latest(tmp_path) is None
    recorded.set()
    saver.end()
    assert latest(tmp_path) == tmp_path / "epoch-0000-000008"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (rb"{\"first.weight", rb"{\"worst.weight"),
        (rb"{\"saved_offsets\": [0", rb"{\"saved_offsets\": [#"),
        (rb"{\"saved_offsets\": [0", rb"{\"saved_offsets\": [1"),
    ],
)
def test_what_torch_adds_to_a_file_may_be_broken_too(
    old: bytes, new: bytes, tmp_path: Path, model: nn.Module
) -> None:
    """KeyError and JSONDecodeError were tracebacks; with the last, a row was left as it was."""
    path = save(tmp_path, model)
    file = path / "model-00001-of-00002.safetensors"
    content = file.read_bytes()
    assert old in content
    file.write_bytes(content.replace(old, new, 1))
    with pytest.raises(UserError, match="epoch-0001: "):
        load_all(path)
