"""pd-train on plans whose stages are on meshes of devices learns what it does without meshes.

The reference has the same stages and replicas, each on one device; that it learns what the plain
model does is shown elsewhere. All runs of a test are in the same processes.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import typed
from order_runs import MOMENTUM, plan_of, prepare, train
from sharded_models import Rising
from sharded_results import assert_alike, assert_equal, checkpoint, metrics
from sharded_runs import Case, alone, captured, job_of, sharded_plan, train_cases
from torch.nn.functional import cross_entropy
from training import run_jobs

from pipedream.capture.programs.loss_end import LOSS, Target
from pipedream.graph.placements.placement import Mesh
from pipedream.graph.plan import Plan, write_plan
from pipedream.runtime.checkpoint.files import load_all
from pipedream.runtime.stages.planned_passes import PlannedPasses
from pipedream.runtime.stages.stage_module import StageModule

ADAM = {"name": "AdamW", "args": {"lr": 0.01, "eps": 1e-4}}
"""The loss does not depend on the bias of the keys: with the usual eps Adam would make steps of the
rounding errors that are its gradient.
"""
SLOW = {"name": "SGD", "args": {"lr": 0.001, "momentum": 0.9}}
"""With larger steps a narrow ResNet is chaotic: differences in the last digit grow."""


MESHES = {
    "two": Case("two"),
    "four": Case("four", meshes=((4,),)),
    "one by four": Case("one by four", meshes=((1, 4),)),
    "two by two": Case("two by two", meshes=((2, 2),), values={"input 0": "S(0),R"}),
}
"""In the last one minibatches are divided along the first axis."""


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("model", "replicas", "meshes"),
    [
        ("Perceptron", (1,), ((2,),)),
        ("Fused", (1, 1), ((2,), None)),
        ("Convolutions", (1,), ((2,),)),
    ],
)
def test_compiled_meshes(
    tmp_path: Path, model: str, replicas: tuple[int, ...], meshes: tuple[Mesh | None, ...]
) -> None:
    """With a smaller last minibatch; the devices that divide a batch add up its statistics."""
    changes = {"dtype": "float32", "drop_last": False, "microbatches": 2, "optimizer": SLOW}
    values = {"input 0": "S(0)"} if model == "Convolutions" else {}
    plain = Case("plain", replicas, meshes, changes=changes, values=values)
    compiled = replace(plain, name="compiled", changes={**changes, "compile": "aot_eager"})
    train_cases(tmp_path, model, [plain, compiled])
    assert_equal(tmp_path / "compiled", tmp_path / "plain", 1e-5)


@pytest.mark.slow
@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("model", "meshes"),
    [
        ("Perceptron", ["two", "two by two"]),
        ("Perceptron", ["four", "one by four"]),
        ("VGG", list(MESHES)),
        ("Fused", ["four", "two by two"]),
        ("Separate", ["two by two"]),
        ("resnet18", ["two", "two by two"]),
    ],
)
def test_meshes(tmp_path: Path, model: str, meshes: list[str]) -> None:
    """Dropout and batch norm are as on one device."""
    optimizer = SLOW if model == "resnet18" else ADAM
    changes = {"microbatches": 2, "clip_norm": 0.5, "optimizer": optimizer, "evaluate_every": None}
    assert_alike(tmp_path, model, [replace(MESHES[name], changes=changes) for name in meshes])


PAIR: tuple[Mesh, ...] = ((2,), (2,))
SHAPES = {
    "mesh and one": Case("mesh and one", (1, 1), ((2,), None)),
    "one and mesh": Case("one and mesh", (1, 1), (None, (2,))),
    "two meshes": Case("two meshes", (1, 1), PAIR),
    "replicas of meshes": Case("replicas of meshes", (2, 1), ((2,), None)),
    "meshes of other sizes": Case("meshes of other sizes", (1, 1), ((3,), (2,))),
    "one and replicas of meshes": Case("one and replicas of meshes", (1, 2), (None, (2,))),
}


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", ["flush", "weight-stashing", "2bw"])
def test_pipelines_of_meshes(tmp_path: Path, schedule: str) -> None:
    """Stages on meshes beside stages on one device, with replicas, 2 x 2 and uneven; clipped, and
    with a smaller last minibatch and evaluation.
    """
    data = {"source": "sharded_models:points", "args": {"examples": 33}}
    changes = {"optimizer": ADAM, "clip_norm": 0.3, "data": data, "drop_last": False}
    by_replicas: dict[tuple[int, ...], list[Case]] = {}
    for case in SHAPES.values():
        changed = replace(case, schedule=schedule, changes=changes)
        by_replicas.setdefault(tuple(case.replicas), []).append(changed)
    for number, cases in enumerate(by_replicas.values()):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert_alike(folder, "Perceptron", cases)


BATCH = {"input 0": "S(0)"}


@pytest.mark.thorough
def test_what_crosses_between_meshes(tmp_path: Path) -> None:
    """Each device is sent a part of what is whole on all, and they gather the rest where links
    between the stages are slow. What is divided alike in both stages crosses in parts.
    """
    data = {"source": "sharded_models:points", "args": {"examples": 33}}
    changes = {"optimizer": ADAM, "data": data, "drop_last": False}
    cases = [
        Case("gathered", (1, 1), PAIR, machines=(2, 2)),
        Case("one to two", (1, 1), (None, (2,)), machines=(1, 3)),
        Case("two to three", (1, 1), ((2,), (3,)), machines=(1, 5)),
        Case("in parts", (1, 1), PAIR, values=BATCH),
        Case("parts of another number", (1, 1), ((3,), (2,)), values=BATCH),
        Case("gathered along an axis", (1, 1), ((2,), (2, 2)), machines=(2, 3)),
    ]
    assert_alike(tmp_path, "Perceptron", [replace(case, changes=changes) for case in cases])


@pytest.mark.thorough
@pytest.mark.parametrize("loss", ["mse_loss", "sharded_models:rounded_down"])
def test_losses(tmp_path: Path, loss: str) -> None:
    """One is part of the last stage's passes, one looks at values and is computed of the whole
    output. Evaluation computes either so, and a smaller last minibatch has passes of its own.
    """
    points = "vectors" if loss == "mse_loss" else "points"
    data = {"source": f"sharded_models:{points}", "args": {"examples": 33}}
    changes = {"loss": loss, "optimizer": ADAM, "data": data, "drop_last": False}
    cases = [SHAPES["one and mesh"], SHAPES["two meshes"]]
    assert_alike(tmp_path, "Perceptron", [replace(case, changes=changes) for case in cases])


@pytest.mark.parametrize("constant", [True, False])
def test_a_loss_that_differs_from_call_to_call_is_no_part_of_the_passes(constant: bool) -> None:
    whole = captured("Perceptron")
    plan = sharded_plan("Perceptron", Case("run"), whole)
    module = StageModule.of(whole, plan, 0)
    names = frozenset(name for name, _ in module.piece.module.named_parameters())
    module.program.planned = PlannedPasses.of(plan, 0, 0, names)
    module.end_in(cross_entropy if constant else Rising())
    values, target = {whole.inputs[0]: torch.randn(4, 6)}, Target.of(torch.tensor([0, 1, 2, 0]))
    named = module.program.on_mesh(dict(module.piece.module.named_parameters()), values, target)
    assert named.outputs == ((LOSS,) if constant else whole.outputs)


@pytest.mark.thorough
def test_a_run_goes_on_with_other_meshes(tmp_path: Path) -> None:
    """From two devices to four to none, Adam's state with it: each reads its slices of whole
    tensors.
    """
    changes = {"optimizer": ADAM, "evaluate_every": None}
    order = [Case("run"), Case("run", meshes=((4,),)), Case("run", meshes=(None,))]
    whole, kept = captured("Perceptron"), [replace(case, changes=changes) for case in order]
    jobs = [
        job_of(tmp_path, "Perceptron", case, whole, epochs=epochs, resume=epochs > 1)
        for epochs, case in enumerate(kept, start=1)
    ]
    straight = replace(alone(kept[0]), changes=changes | {"epochs": 3})
    run_jobs([*jobs, job_of(tmp_path, "Perceptron", straight, whole)])
    expected = checkpoint(tmp_path, straight)
    torch.testing.assert_close(checkpoint(tmp_path, kept[0]), expected, rtol=1e-12, atol=1e-12)
    assert metrics(tmp_path, kept[0]) == pytest.approx(metrics(tmp_path, straight), rel=1e-12)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("VGG", {"optimizer": ADAM}),
        ("Perceptron", {"optimizer": {"name": "RMSprop", "args": {"lr": 0.01}}, "accumulate": 2}),
    ],
)
def test_recomputation(tmp_path: Path, model: str, changes: dict[str, object]) -> None:
    """The first of two stages, which has dropout in one model."""
    case = Case("recomputing", (1, 1), PAIR, recompute=(0,), changes=changes)
    if "accumulate" in changes:
        case = replace(case, schedule="weight-stashing")
    assert_alike(tmp_path, model, [case])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("Perceptron", {"optimizer": ADAM}),
        ("Fused", {"optimizer": ADAM}),
        ("Convolutions", {"optimizer": SLOW}),
        ("resnet18", {"optimizer": SLOW, "drop_last": False}),
    ],
)
@pytest.mark.parametrize("again", [1, 2])
def test_recomputation_of_single_nodes(
    tmp_path: Path, model: str, changes: dict[str, object], again: int
) -> None:
    """All, or every second, with dropout, and batch norms whose statistics are not to be updated
    twice, by one device or by those that divide the batch: as autograd does it on one device.
    """
    values = BATCH if model == "Convolutions" else {}
    case = Case("recomputing", (1, 1), PAIR, again=again, changes=changes, values=values)
    assert_alike(tmp_path, model, [case, replace(case, name="without", again=0)])


@pytest.mark.thorough
def test_autocast(tmp_path: Path) -> None:
    """bfloat16 has eight bits: sums in another order differ by some thousandths."""
    changes = {"dtype": "float32", "autocast": "bfloat16", "evaluate_every": None}
    assert_alike(tmp_path, "Perceptron", [Case("lowered", changes=changes)], tolerance=0.01)


SGD = {"name": "SGD", "args": {"lr": 0.1}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "told"),
    [
        ({"name": "Adafactor"}, "optimizer: Adafactor has to see the whole of 0.weight"),
        (
            {"name": "Muon", "others": {"lr": 0.1}},
            "optimizer: Muon has to see the whole of 0.weight",
        ),
        (
            SGD | {"groups": [{"match": ["2.weight"], "name": "Muon"}]},
            "optimizer.groups.0: Muon has to see the whole of 2.weight",
        ),
    ],
)
def test_optimizers_that_look_at_all_of_a_parameter(
    tmp_path: Path, optimizer: dict[str, object], told: str
) -> None:
    with pytest.raises(AssertionError, match=told):
        train_cases(tmp_path, "Perceptron", [Case("run", changes={"optimizer": optimizer})])


@pytest.mark.thorough
@pytest.mark.parametrize("killed", [1, 2])
def test_a_killed_device_is_named_and_the_run_goes_on(tmp_path: Path, killed: int) -> None:
    """One of a team, or the stage after it: the run ends with one line, or goes on from its
    checkpoint to the very same end.
    """
    changes = {"optimizer": MOMENTUM, "epochs": 3, "clip_norm": 0.05}
    plan = on_mesh(plan_of("Chain", None, [[0], [1]], 4))
    data: dict[str, object] = {"args": {}, "source": "small_models:classes"}
    prepare(tmp_path, "Chain", "1f1b", [[0], [1]], data=data, **changes)
    write_plan(plan, tmp_path / "plan.json")
    train(tmp_path, run="whole")
    data = {"args": {"rank": killed}, "source": "small_models:deadly"}
    prepare(tmp_path, "Chain", "1f1b", [[0], [1]], data=data, **changes)
    write_plan(plan, tmp_path / "plan.json")
    words = ["pd-train", "plan.json", "--config", "run.yaml", "--save-every", "4", "-o"]
    done = typed(tmp_path, [*words, "lost"])
    line = rf"pd-train: rank {killed} was killed by SIGKILL in epoch [12] at \S+, minibatch \d+; "
    (said,) = (each for each in done.error.splitlines() if each.startswith("pd-train: "))
    assert re.fullmatch(line + "all workers stopped", said)
    assert done.code == 1
    done = typed(tmp_path, [*words, "again", "--max-restarts", "1"])
    assert done.code == 0, done.error
    one, other = (load_all(tmp_path / run / "checkpoints/latest") for run in ("whole", "again"))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def on_mesh(plan: Plan) -> Plan:
    """The first of two stages on two devices."""
    data = plan.model_dump(exclude_none=True)
    data["cluster"]["machines"] = (3,)
    first, last = data["stages"]
    first |= {"ranks": (0, 1), "mesh": (2,), "placements": {"parameters": {"*weight": "S(0)"}}}
    last["ranks"] = (2,)
    return Plan.model_validate(data)


def _placed(parameters: dict[str, str]) -> dict[str, object]:
    return {"placements": {"parameters": parameters}}


@pytest.mark.slow
@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"mesh": [3]}, "stage 0 has 2 ranks, which is no multiple of the 3 devices of its mesh"),
        ({"mesh": [0]}, "mesh.0: 0 is too small: give more than 0"),
        ({"mesh": [2, 1]}, r"\*weight: S\(0\) has 1 placements for 2 mesh axes"),
        ({"mesh": None}, "stage 0 has placements and no mesh"),
        (_placed({"*weight": "P"}), "is a sum, which only operators can give"),
        (_placed({"*weight": "S(x)"}), r"'S\(x\)'"),
        (
            _placed({"*weight": "S(2)"}),
            r"a.linear.weight of shape \(6, 6\) cannot be placed S\(2\)",
        ),
        (_placed({"*weight": "S(0, chunks=5)"}), "cannot be placed"),
        (_placed({"a.weight": "S(0)"}), "a.weight: no parameter has this name; did you mean"),
        ({"placements": {"values": {"input 3": "S(0)"}}}, "input 3: no value has this name"),
        ({"placements": {"values": {"input 0": "S(5)"}}}, r"cannot be placed S\(5\)"),
        ({"placements": {"parameter": {}}}, "placements.parameter"),
    ],
)
def test_wrong_placements_are_told_in_one_line(
    tmp_path: Path, changes: dict[str, object], told: str
) -> None:
    prepare(tmp_path, "Chain", "1f1b", [[0], [1]])
    plan = on_mesh(plan_of("Chain", None, [[0], [1]], 4)).model_dump(exclude_none=True)
    plan["stages"] = [plan["stages"][0] | changes, plan["stages"][1]]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    done = typed(tmp_path, ["pd-train", "plan.json", "--config", "run.yaml", "-o", "run"])
    assert done.code == 2
    (said,) = (each for each in done.error.splitlines() if each.startswith("pd-train: "))
    assert re.search(told, said), said
    assert "Traceback" not in done.error
