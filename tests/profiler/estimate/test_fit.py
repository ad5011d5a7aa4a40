"""A device file that is fitted to profiles gives back what these were made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from estimates import device, estimated

from pipedream.graph.errors import UserError
from pipedream.profiler.estimate.device_file import DeviceFile, read_device
from pipedream.profiler.estimate.fit import MeasuredModel, compare, fit, with_error
from pipedream.profiler.report.files import write_files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Profiles that took exactly what the file of a CPU says."""
    folder = tmp_path_factory.mktemp("profiles")
    for name in ("transformers:llama", "transformers:bert", "torchvision:resnet18"):
        write_files(estimated(name), folder / name.partition(":")[2])
    return folder


def blank() -> DeviceFile:
    known = read_device("cpu")
    return known.model_copy(update={"efficiency": {}, "updates": {}, "launch": 1e-9, "error": None})


@pytest.mark.slow
@pytest.mark.thorough
def test_fitted_models_take_what_they_took(folder: Path) -> None:
    models = [MeasuredModel.read(folder / name) for name in ("llama", "bert", "resnet18")]
    fitted = fit(blank(), models)
    for name, each in compare(fitted, models).items():
        assert abs(each.passes) < 0.05, name
        assert max(each.node, each.each_node) < 0.1, name
    assert fitted.updates == pytest.approx(read_device("cpu").updates, rel=0.02)
    assert fitted.host == {}


@pytest.mark.slow
def test_a_model_that_was_held_out_says_how_far_it_is_off(folder: Path) -> None:
    bert, llama, resnet = (MeasuredModel.read(folder / n) for n in ("bert", "llama", "resnet18"))
    fitted = fit(blank(), [bert, resnet])
    errors = compare(fitted, [llama])
    told = with_error(fitted, errors).error
    assert told is not None
    assert told.models == ("llama",)
    assert told.model == told.worst == pytest.approx(abs(errors["llama"].passes), rel=0.01)


@pytest.mark.slow
def test_models_that_a_device_waits_in_say_what_its_host_takes(folder: Path) -> None:
    """A device that is much faster than what was measured waits in all of it, or in one model."""
    bert, llama = (MeasuredModel.read(folder / name) for name in ("bert", "llama"))
    fast = device(efficiency={})
    with pytest.raises(UserError, match="waits for its host"):
        fit(fast, [bert, llama])
    seconds = {name: own / 1e4 for name, own in llama.operators.seconds.items()}
    busy = replace(llama, operators=llama.operators.model_copy(update={"seconds": seconds}))
    fitted = fit(fast, [bert, busy])
    assert fitted.host["usual"] > 0
    assert abs(compare(fitted, [bert])["bert"].passes) < 0.5
