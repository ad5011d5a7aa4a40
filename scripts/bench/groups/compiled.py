"""Is what pd-profile measures of compiled stages what training takes, and what does it gain?

    python scripts/bench/groups/compiled.py [MODEL]... [--ways none,stage,groups] [--turns 1]

As a user does it: for each model pd-profile RUN.YAML --compile auto, and for each way pd-profile
with that, pd-optimize for so many workers in a row, pd-train. All ways are trained in turns. A line
for each: expected and measured seconds of the passes of the first stage, and of a minibatch; the
bytes that a forward pass keeps, expected and counted, and the last loss; and which way auto takes,
with the seconds that compiling takes. `fusible`: the seconds of operators that are not complicated.
`profiled`: what passes that are not compiled took beside, which tells how fast the machine was.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import pandas as pd
import torch
import yaml

BENCH = Path(__file__).parents[1]
sys.path.insert(0, str(BENCH))

from efficiency import call  # noqa: E402
from prediction import MODELS  # noqa: E402

from pipedream.capture.captured import flatten_inputs  # noqa: E402
from pipedream.capture.compute_settings import Precision  # noqa: E402
from pipedream.capture.export import capture  # noqa: E402
from pipedream.capture.sources.load import load_config  # noqa: E402
from pipedream.graph.model import read_graph  # noqa: E402
from pipedream.graph.placements.operator_class import OperatorClass  # noqa: E402
from pipedream.graph.placements.operators import read_operators  # noqa: E402
from pipedream.graph.plan import Plan, read_plan  # noqa: E402
from pipedream.graph.profile import read_profile  # noqa: E402
from pipedream.graph.run_config import read_config  # noqa: E402
from pipedream.optimizer.cuts.groups import classes_of  # noqa: E402
from pipedream.profiler.memory import address, saving  # noqa: E402
from pipedream.runtime.stages.randomness import MinibatchRng  # noqa: E402
from pipedream.runtime.stages.stage_module import StageModule  # noqa: E402

CPU = torch.device("cpu")
SECONDS = 15
"""About how long a run trains."""


IMAGES = {
    "data": {"source": "models:image_data", "args": {"size": 64}},
    "loss": "cross_entropy",
    "optimizer": {"name": "SGD", "args": {"lr": 1e-3, "momentum": 0.9}},
    "batch_size": 2,
}
"""Small minibatches of networks with many norms."""
TOKENS = {
    "data": {"source": "models:token_data", "args": {"tokens": 64, "vocabulary": 2048}},
    "loss": "output",
    "optimizer": {"name": "AdamW", "args": {"lr": 1e-4}},
}
BERT = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
}
LLAMA = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 688,
}
MORE: dict[str, dict[str, Any]] = {
    "mobilenet": {
        "model": {"source": "torchvision:mobilenet_v3_small", "args": {"num_classes": 10}},
        **IMAGES,
    },
    "regnet": {
        "model": {"source": "torchvision:regnet_y_400mf", "args": {"num_classes": 10}},
        **IMAGES,
    },
    "vit": {
        "model": {"source": "timm:vit_tiny_patch16_224", "args": {"num_classes": 10}},
        **IMAGES,
        "data": {"source": "models:image_data", "args": {"size": 224}},
    },
    "efficientnet": {
        "model": {"source": "torchvision:efficientnet_b0", "args": {"num_classes": 10}},
        **IMAGES,
    },
    "llama": {
        "model": {"source": "transformers:llama", "args": LLAMA},
        **TOKENS,
        "batch_size": 1,
    },
    "bert": {
        "model": {"source": "transformers:bert", "args": BERT},
        **TOKENS,
        "batch_size": 4,
    },
}


@click.command()
@click.argument("names", nargs=-1)
@click.option("--stages", default=1, show_default=True)
@click.option("--ways", default="none,stage,groups", show_default=True)
@click.option("--turns", default=1, show_default=True)
def main(names: tuple[str, ...], stages: int, ways: str, turns: int) -> None:
    os.environ["PYTHONPATH"], os.environ["OMP_NUM_THREADS"] = str(BENCH), "1"
    folder, rows = Path(tempfile.mkdtemp(prefix="bench-")), []
    for name in names or (*MODELS, *MORE):
        own = folder / name
        plans = {way: planned(name, way, stages, own / way) for way in ways.split(",")}
        print(chosen(name, own / "auto"), flush=True)
        for turn in range(turns):
            for way in plans:
                rows.append(row(name, way, plans, own / way, turn))
                print(rows[-1], flush=True)
    frame = pd.DataFrame(rows)
    print(frame.to_string(index=False, float_format="%.4f"))
    errors = frame.error.abs()
    print(f"median {errors.median():.1%}, worst {errors.max():.1%}")


def chosen(name: str, folder: Path) -> dict[str, Any]:
    """What auto takes, with the milliseconds of all ways, and the seconds that they compile in."""
    folder.mkdir(parents=True)
    call("pd-profile", prepare(name, "auto", folder, 16), "-o", folder / "profile")
    profile = read_profile(folder / "profile/profile.json")
    ways = {str(way.compile): way for way in profile.compile_compared}
    found = {"model": name, "auto": profile.compile, "refused": profile.not_compiled}
    found["fusible"] = f"{1e3 * fusible(folder.parent / 'none/profile'):.1f} ms"
    for way, own in ways.items():
        forms = f"{own.forms}/{own.groups}"
        found[way] = f"{1e3 * own.seconds:.1f} ms, {own.compile_seconds:.1f} s, {forms}"
    return found


def fusible(profiled: Path) -> float:
    """Seconds of a pass in operators other than products, convolutions and the like."""
    graph, operators = read_graph(profiled / "graph.txt"), None
    if (file := profiled / "operators.json").exists():
        operators = read_operators(file)
    classes = classes_of(graph, operators)
    return sum(
        node.compute_seconds
        for name, node in graph.nodes.items()
        if classes[name] != OperatorClass.COMPLICATED
    )


def kept(config: Path, plan: Plan) -> int:
    """Bytes that a forward pass of a plan of one stage, run as pd-train does, keeps for the
    backward pass beside what was there before.
    """
    loaded = load_config(read_config(config), config.parent)
    captured = capture(
        loaded.model, loaded.args, loaded.kwargs, precision=Precision(loaded.autocast, CPU)
    )
    stage = StageModule.of(captured, plan, 0, MinibatchRng(0, CPU), plan.compile)
    given = captured.on_device(flatten_inputs(loaded.args, loaded.kwargs), CPU)
    inputs = tuple(given[name] for name in stage.piece.inputs)
    with saving() as sizes:
        results = stage.compute(stage.piece.state, inputs)
    before = set(map(address, (*stage.piece.state.values(), *inputs)))
    del results
    return sum(size for place, size in sizes.items() if place not in before)


def planned(name: str, way: str, stages: int, folder: Path) -> Plan:
    folder.mkdir(parents=True)
    call("pd-profile", prepare(name, way, folder, 16), "-o", folder / "profile")
    links = ("--machines", stages, "--bandwidth", "5GB", "--straight")
    call("pd-optimize", folder / "profile/graph.txt", *links, "-o", folder / "plan")
    return read_plan(folder / "plan/plan.json")


def row(name: str, way: str, plans: Mapping[str, Plan], folder: Path, turn: int) -> dict[str, Any]:
    """Trains for some seconds, all ways equally many minibatches."""
    longest = max(plan.predicted.seconds_per_minibatch for plan in plans.values())
    config = prepare(name, way, folder, int(SECONDS / longest))
    run = folder / f"run-{turn}"
    call(
        *("pd-train", folder / "plan/plan.json", "--config", config, "-o", run),
        "--no-evaluate",
    )
    summary = json.loads((run / "summary.json").read_text())
    (rank, *_) = json.loads((run / "measured.json").read_text())["ranks"]
    profile = read_profile(folder / "profile/profile.json")
    calls = profile.training_overheads
    assert calls is not None
    own = plans[way].stages[0].compute_seconds + calls.call_forward + calls.call_backward
    passes = rank["forward"]["median"] + rank["backward"]["median"]
    return {
        "model": name,
        "compiled": way,
        "expected": own,
        "passes": passes,
        "error": own / passes - 1,
        "profiled": statistics.median(profile.pass_seconds),
        "minibatch": summary["seconds_per_minibatch"],
        "saved": sum(node.saved_bytes or 0 for node in profile.nodes if not node.is_input),
        "kept": kept(config, plans[way]) if turn == 0 else 0,
        "loss": summary["final_loss"],
    }


def prepare(name: str, way: str, folder: Path, minibatches: int) -> Path:
    """The run config, for an epoch of so many minibatches."""
    run: dict[str, Any] = {"format": "pipedream-run/1", **(MODELS | MORE)[name]}
    data = {**run["data"]}
    data["args"] = {**data.get("args", {}), "examples": minibatches * run["batch_size"]}
    own = {**run, "data": data, "compile": way}
    path = folder / f"run-{minibatches}.yaml"
    path.write_text(yaml.safe_dump(own))
    return path


if __name__ == "__main__":
    main()
