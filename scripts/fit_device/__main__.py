"""Fits a device file, for `pd-profile --for`, to measurements on a device that is at hand.

    python scripts/fit_device measure OUT --device cuda --dtype bfloat16
    python scripts/fit_device fit BLANK.yaml OUT -o h100.yaml
    python scripts/fit_device compare h100.yaml OUT

`measure` profiles models as pd-profile does, those to fit to into OUT/fit and those to compare with
into OUT/held-out: on one core about five minutes. `fit` writes BLANK.yaml, which has the name, the
sources, peaks and the bandwidth, with efficiencies and the errors found on the models held out.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click
import yaml

sys.path.insert(0, str(Path(__file__).parent))

from models import SETS, Case


@click.group(help=__doc__)
def main() -> None:
    pass


@main.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--device", default="cpu", show_default=True)
@click.option("--dtype", default="float32", show_default=True)
@click.option("--seconds", default=4.0, show_default=True, help="Of passes of each model, at most.")
@click.option("--only", multiple=True, help="Names of models; repeat for more.")
@click.option("--until", default=float("inf"), help="Seconds after which none is begun.")
def measure(
    out: Path, device: str, dtype: str, seconds: float, only: tuple[str, ...], until: float
) -> None:
    """Profiles the models."""
    began = time.monotonic()
    for kind, cases in SETS[device].items():
        for name, case in cases.items():
            if only and name not in only:
                continue
            if time.monotonic() - began > until:
                print(f"{kind}/{name}: left out")
                continue
            start = time.monotonic()
            try:
                _measure(case, out / kind / name, device, dtype, seconds)
            except Exception as error:  # the others are worth having
                print(f"{kind}/{name}: {type(error).__name__}: {str(error).splitlines()[:1]}")
                continue
            print(f"{kind}/{name}: {time.monotonic() - start:.1f} s", flush=True)


def _measure(case: Case, folder: Path, device: str, dtype: str, seconds: float) -> None:
    import torch

    from pipedream.capture.sources.load import in_dtype, load
    from pipedream.profiler.assembly import Settings
    from pipedream.profiler.measure import measure
    from pipedream.profiler.report.files import write_files
    from pipedream.profiler.timing.stopping_rule import StoppingRule

    torch.manual_seed(0)
    loaded = in_dtype(load(case.source, case.args, case.batch_size, case.inputs), dtype)
    rule = StoppingRule(seconds=seconds)
    settings = Settings(
        *(case.source, case.args, case.batch_size, torch.device(device), rule, 1), shards=()
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_files(measure(loaded, settings), folder)
    if device == "cuda":
        torch.cuda.empty_cache()


@main.command()
@click.argument("blank", type=click.Path(path_type=Path, exists=True))
@click.argument("out", type=click.Path(path_type=Path, exists=True))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
def fit(blank: Path, out: Path, output: Path) -> None:
    """Fits BLANK to the profiles in OUT."""
    from pipedream.graph.errors import read_artifact
    from pipedream.profiler.estimate import fit as fitting
    from pipedream.profiler.estimate.device_file import DeviceFile

    fitted = fitting.fit(read_artifact(blank, DeviceFile), _models(out / "fit"))
    _print_errors("fitted to", fitting.compare(fitted, _models(out / "fit")))
    if (out / "held-out").is_dir():
        errors = fitting.compare(fitted, _models(out / "held-out"))
        _print_errors("held out", errors)
        fitted = fitting.with_error(fitted, errors)
    text = yaml.safe_dump(
        fitted.model_dump(mode="json", exclude_none=True),
        sort_keys=False,
        default_flow_style=None,
        width=100,
    )
    output.write_text(text)


@main.command()
@click.argument("device")
@click.argument("folder", type=click.Path(path_type=Path, exists=True))
def compare(device: str, folder: Path) -> None:
    """Compares DEVICE, a name or a file, with the profiles in FOLDER."""
    from pipedream.profiler.estimate import fit as fitting
    from pipedream.profiler.estimate.device_file import read_device

    _print_errors(str(folder), fitting.compare(read_device(device), _models(folder)))


def _models(folder: Path) -> list:
    from pipedream.profiler.estimate.fit import MeasuredModel

    return [MeasuredModel.read(each.parent) for each in sorted(folder.glob("*/profile.json"))]


def _print_errors(title: str, errors: dict[str, Any]) -> None:
    print(f"{title}: model | passes | median node, weighted | unweighted, of 20 us or more")
    for name, each in errors.items():
        print(
            f"{name} | {100 * each.passes:+.1f} % | {100 * each.node:.1f} %"
            f" | {100 * each.each_node:.1f} %"
        )


if __name__ == "__main__":
    main()
