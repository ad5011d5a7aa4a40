"""Why a worker has failed, as the launcher or torchrun tells it."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import typed
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from pipedream.comm.rank_info import RankInfo
from pipedream.runtime.supervise.heartbeat import Heartbeats
from pipedream.runtime.supervise.launch import record_error


def summary(file: Path, code: int) -> str:
    """What torchrun says at its end of a rank with this error file."""
    return ChildFailedError("pd-train", {0: ProcessFailure(0, 1, code, str(file))}).format_msg()


@pytest.mark.thorough
@pytest.mark.slow
def test_the_summary_of_torchrun_names_an_error_of_the_user(folder: Path) -> None:
    """It said `To enable traceback see: https://pytorch.org/...`, far below the error itself."""
    config = folder / "run.yaml"
    config.write_text(config.read_text() + "loss: small_models:nothing\n")
    file = folder / "error.json"
    variables = RankInfo(0, 2, 0, 2, "127.0.0.1", 1).variables()
    variables |= {"TORCHELASTIC_ERROR_FILE": str(file)}
    done = typed(folder, ["pd-train", "plan.json", "--config", "run.yaml"], variables)
    assert done.code == 2
    line = done.error.removeprefix("pd-train: ").strip()
    assert "has no 'nothing'" in line
    told = summary(file, 2)
    assert f"traceback : {line}\n" in told


def test_an_exception_is_recorded_with_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(ZeroDivisionError) as caught:
        1 / 0  # noqa: B018
    record_error(caught.value)
    told = summary(tmp_path / "error.json", 1)
    assert "Traceback (most recent call last):" in told
    assert "ZeroDivisionError: division by zero" in told


def test_the_launcher_is_told_the_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.setenv("RANK", "1")
    heartbeats = Heartbeats.make(3)
    for rank in range(3):
        heartbeats.report(rank, f"in epoch 1 at {rank}F7")
    record_error(RuntimeError("the first line\nand more"), heartbeats)
    assert heartbeats.of(1).words == "in epoch 1 at 1F7"
    assert heartbeats.of(1).cause == "RuntimeError: the first line"
    record_error("x" * 10_000, heartbeats)
    assert set(heartbeats.of(1).cause) == {"x"}
    assert heartbeats.of(2).words == "in epoch 1 at 2F7"
    assert [heartbeats.of(rank).cause for rank in (0, 2)] == ["", ""]
