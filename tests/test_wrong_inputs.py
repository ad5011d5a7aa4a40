"""Wrong inputs as users type them: one clear line, a non-zero exit, and no process left behind."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
import small_models
import torch
from commands import begin, start, typed
from plans import cut, make_plan
from torch import nn

from pipedream.capture.export import capture
from pipedream.graph.model import format_graph
from pipedream.graph.plan import write_plan

SUPPORT = Path(small_models.__file__).parent
NODE = (
    "forward_compute_time=1.000, backward_compute_time=2.000, "
    "activation_size=8.0, parameter_size=4.000"
)
CONFIG = """\
format: pipedream-run/1
model: {source: "small_models:Noisy"}
data: {source: "small_models:classes"}
optimizer: {name: SGD, args: {lr: 0.1}}
batch_size: 4
"""
USER = """\
import time
import torch
from small_models import Noisy, classes

class Late:
    "Breaks at one of its examples, once training runs."
    def __len__(self):
        return 60
    def __getitem__(self, index):
        if index == 37:
            raise KeyError("no such image")
        return torch.zeros(6), 0

class Slow(Late):
    def __getitem__(self, index):
        time.sleep(0.05)
        return torch.zeros(6), 0

def late():
    return Late(), None

def slow():
    return Slow(), None

def rubbish():
    return 3

def vector(output, target):
    return output - 1
"""


def graph_of(*lines: str) -> str:
    return "\n".join(lines)


A, B = f"a -- Linear -- {NODE}", f"b -- ReLU -- {NODE}"
GRAPHS = {
    "good.txt": graph_of(A, B, "\ta -- b"),
    "unknown.txt": graph_of(A, B, "\ta -- c"),
    "cycle.txt": graph_of(A, B, "\ta -- b", "\tb -- a"),
    "twice.txt": graph_of(A, A),
    "negative.txt": graph_of(A, B.replace("=1.000", "=-1.000")),
    "nan.txt": graph_of(A, B.replace("=8.0", "=nan")),
    "missing.txt": graph_of(A, B.replace("parameter_size", "size")),
    "empty.txt": "",
    "binary.txt": "\x00\x01\x02",
}
RUNS = {
    "run": CONFIG,
    "no_yaml": "format: [pipedream",
    "list": "- a\n- b\n",
    "unknown_field": CONFIG + "batchsize: 3\n",
    "no_batch": CONFIG.replace("batch_size: 4\n", ""),
    "word": CONFIG.replace("batch_size: 4", "batch_size: four"),
    "optimizer": CONFIG.replace("SGD", "SDG"),
    "option": CONFIG.replace("lr: 0.1", "learning: 0.1"),
    "loss": CONFIG + "loss: cross_entrophy\n",
    "vector": CONFIG + 'loss: "user:vector"\n',
    "no_model": CONFIG.replace("Noisy", "Noisi"),
    "no_module": CONFIG.replace("small_models:Noisy", "small_model:Noisy"),
    "no_data": CONFIG.replace("small_models:classes", "user:rubbish"),
    "too_large": CONFIG.replace("batch_size: 4", "batch_size: 4000"),
    "one_left": CONFIG.replace("batch_size: 4", "batch_size: 59"),
    "drop": CONFIG + "drop_last: 1\n",
    "late": CONFIG.replace("small_models:classes", "user:late"),
    "slow": CONFIG.replace("small_models:classes", "user:slow"),
    "nan": CONFIG.replace("lr: 0.1", "lr: 1.0e+30") + "epochs: 3\n",
    "other": CONFIG.replace("Noisy", "Tied"),
    "adam": CONFIG.replace("SGD", "Adam"),
    "near": CONFIG + "clip: 1.0\n",
    "scale": CONFIG + "loss_scale: .inf\n",
    "betas": CONFIG.replace("{name: SGD, args: {lr: 0.1}}", "{name: Adam, args: {betas: [0.9]}}"),
    "loss_class": CONFIG + 'loss: "torch.nn:CrossEntropyLoss"\n',
    "pattern": CONFIG.replace("0.1}", '0.1}, groups: [{match: ["*.bais"]}]'),
    "match": CONFIG.replace("0.1}", '0.1}, groups: [{match: "*.bias"}]'),
    "flat": CONFIG.replace("0.1}", '0.1}, groups: [{match: ["*.bias"], lr: 1.0}]'),
    "muon": CONFIG.replace("SGD", "Muon"),
    "held_out": CONFIG + "scheduler: {name: ReduceLROnPlateau, metric: held_out_loss}\n",
    "varying": CONFIG.replace(':classes"', ':classes", varying: true') + "evaluate_every: 1\n",
    "own": CONFIG + 'held_out_metrics: {accuracy: "user:vector"}\n',
    "own_mean": CONFIG + 'held_out_metrics: {mean: "user:vector"}\nevaluate_every: 1\n',
    "steps": CONFIG + "scheduler: {name: StepLR, args: {step_size: 0}}\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Graphs, run configs and plans, most of them wrong."""
    folder = tmp_path_factory.mktemp("wrong inputs")
    for name, text in GRAPHS.items():
        (folder / name).write_text(text)
    for name, text in RUNS.items():
        (folder / f"{name}.yaml").write_text(text)
    (folder / "user.py").write_text(USER)
    graph = capture(small_models.Noisy(), (torch.randn(4, 6),)).graph
    (folder / "noisy.txt").write_text(format_graph(graph))
    write_plan(make_plan(graph, cut(graph, 2), (1, 1)), folder / "plan.json")
    other = capture(nn.Sequential(nn.Linear(6, 6), nn.ReLU()), (torch.randn(4, 6),)).graph
    write_plan(make_plan(other, cut(other, 2), (1, 1)), folder / "other.json")
    good = (folder / "plan.json").read_text()
    (folder / "cut_off.json").write_text(good[: len(good) // 2])
    (folder / "version.json").write_text(good.replace("pipedream-plan/1", "pipedream-plan/7"))
    (folder / "stranger.json").write_text(good.replace('"node3"', '"node99"', 1))
    (folder / "used/checkpoints/epoch-0001").mkdir(parents=True)
    (folder / "file").write_text("")
    return folder


OPTIMIZE = "--machines 2 --bandwidth 1GB -o out"
WRONG = [
    (f"pd-optimize unknown.txt {OPTIMIZE}", r"unknown.txt:3: edge a -- c: there is no node c"),
    (f"pd-optimize cycle.txt {OPTIMIZE}", r"cycle.txt:\d: cycle"),
    (f"pd-optimize twice.txt {OPTIMIZE}", r"twice.txt:2: node a is given twice"),
    (f"pd-optimize negative.txt {OPTIMIZE}", r"negative.txt:2: .*forward_compute_time.*-1"),
    (f"pd-optimize nan.txt {OPTIMIZE}", r"nan.txt:2: .*activation_size.*nan"),
    (f"pd-optimize missing.txt {OPTIMIZE}", r"missing.txt:2: .*parameter_size is missing"),
    (f"pd-optimize empty.txt {OPTIMIZE}", r"empty.txt:1: there is no node"),
    (f"pd-optimize binary.txt {OPTIMIZE}", r"binary.txt"),
    (f"pd-optimize nowhere.txt {OPTIMIZE}", r"nowhere.txt: .*No such file"),
    ("pd-optimize good.txt --machines 2,2 --bandwidth 1GB", r"2 levels.* 1 bandwidth"),
    ("pd-optimize good.txt --machines 0 --bandwidth 1GB", r"--machines 0"),
    ("pd-optimize good.txt --machines two --bandwidth 1GB", r"--machines two"),
    ("pd-optimize good.txt --machines 2 --bandwidth fast", r"--bandwidth.*fast"),
    ("pd-optimize good.txt --machines 2 --bandwidth -1", r"--bandwidth.*-1"),
    (f"pd-optimize good.txt {OPTIMIZE} --cost-model best", r"--cost-model"),
    (f"pd-optimize good.txt {OPTIMIZE} --memory 1", r"memory|fit"),
    ("pd-optimize good.txt --machines 9 --bandwidth 1GB --straight", r"--straight: 9 devices"),
    ("pd-optimize good.txt --machines 2 --bandwidth 1GB -o file", r"file"),
    ("pd-optimize good.txt --machines 2 --bandwidth 1GB -o file/a/b", r"-o file/a/b: .* is a file"),
    (f"pd-optimize good.txt {OPTIMIZE} --export torch", r"--export torch needs profile.json"),
    ("pd-optimize good.txt --machines 4,2 --bandwidth 1GB,1GB --sweep 5..7", r"--sweep 5..7: none"),
    (f"pd-optimize good.txt {OPTIMIZE} --sweep ١..٤", r"--sweep"),
    (f"pd-optimize plan.json {OPTIMIZE}", r"plan.json: this is a plan: .* PLAN; .*here is a graph"),
    (f"pd-optimize run.yaml {OPTIMIZE}", r"run.yaml: this is a run config: pd-train takes it as"),
    ("pd-profile good.txt -o out", r"good.txt: this is a graph: pd-optimize takes it as GRAPH$"),
    ("pd-profile plan.json -o out", r"plan.json: this is a plan: pd-train takes it as PLAN$"),
    ("pd-train run.yaml --config plan.json", r"run.yaml: this is a run config: .* as --config"),
    (
        "pd-train plan.json --config plan.json",
        r"plan.json: this is a plan: .* here is a run config",
    ),
    ("pd-train good.txt --config run.yaml", r"good.txt: this is a graph: pd-optimize takes it as"),
    ("pd-profile torchvision:resnet999 -o out", r"resnet999.*did you mean"),
    ("pd-profile nowhere:model -o out", r"there is no module nowhere"),
    ("pd-profile user:Late -o out", r"user:Late returns a Late, not a torch.nn.Module"),
    ("pd-profile small_models:Noisy -o out", r"--input"),
    ("pd-profile small_models:Noisy --input 5 -o out", r"Noisy cannot be captured"),
    ("pd-profile small_models:Noisy --input 5 -o out", r"linear: Linear\(.*\), given \[32, 5\]"),
    (
        "pd-profile small_models:Noisy --input 6:int64 -o out",
        r"Linear\(.*given \[32, 6\] of int64",
    ),
    ("pd-profile small_models:Noisy --input 6 --batch-size 0 -o out", r"--batch-size"),
    ("pd-profile small_models:Noisy --input 6 --device cuda:77 -o out", r"cuda:77"),
    ("pd-train nowhere.json --config run.yaml", r"nowhere.json: .*No such file"),
    ("pd-train cut_off.json --config run.yaml", r"cut_off.json:\d+: not JSON"),
    ("pd-train version.json --config run.yaml", r"version.json.*format"),
    ("pd-train stranger.json --config run.yaml", r"stranger.json.*node"),
    ("pd-train plan.json --config no_yaml.yaml", r"no_yaml.yaml:\d"),
    ("pd-train plan.json --config list.yaml", r"list.yaml:1: expected named fields"),
    ("pd-train plan.json --config unknown_field.yaml", r"unknown_field.yaml.*batchsize"),
    ("pd-train plan.json --config unknown_field.yaml", r"unknown field; did you mean batch_size\?"),
    ("pd-train plan.json --config near.yaml", r"near.yaml:6: clip: .*did you mean clip_norm\?"),
    ("pd-train plan.json --config scale.yaml", r"scale.yaml:6: loss_scale: inf is not a finite"),
    ("pd-train plan.json --config no_batch.yaml", r"no_batch.yaml.*batch_size"),
    ("pd-train plan.json --config word.yaml", r"word.yaml.*batch_size"),
    ("pd-train plan.json --config drop.yaml", r"drop.yaml.*drop_last"),
    ("pd-train plan.json --config match.yaml", r"match.yaml:4: .*groups.0.match: .* is not a list"),
    (
        "pd-train plan.json --config flat.yaml",
        r"flat.yaml:4: optimizer.groups.0.lr: unknown field; known fields: args, match, name",
    ),
    ("pd-train plan.json --config held_out.yaml -o held", r"metric: .* write evaluate_every: 1"),
    (
        "pd-train plan.json --config varying.yaml -o v",
        r"evaluate_every: .*varying shapes.* leave it",
    ),
    ("pd-train plan.json --config own.yaml", r"own.yaml:6: held_out_metrics: 'accuracy' names no"),
    (
        "pd-train plan.json --config run.yaml -o new --evaluate-only",
        r"there is no checkpoint in new",
    ),
    (
        "pd-train plan.json --config run.yaml --evaluate-only --resume",
        r"--evaluate-only trains nothing: leave --resume out",
    ),
    (
        "pd-train plan.json --config run.yaml --checkpoint used",
        r"--checkpoint: give --evaluate-only",
    ),
    (
        "pd-train plan.json --config run.yaml --evaluate-only --checkpoint used",
        r"--checkpoint used: this is no checkpoint of a run",
    ),
    (
        "pd-train plan.json --config own_mean.yaml --dry-run",
        r"held_out_metrics.mean: .* returns a te",
    ),
    ("pd-train plan.json --config run.yaml --workers 3", r"--workers 3: the plan is for 2"),
    ("pd-train plan.json --config run.yaml -o file", r"-o.*file.* is a file"),
    ("pd-train plan.json --config run.yaml -o used", r"-o used: there are checkpoints"),
    ("pd-train plan.json --config run.yaml --timeout 0", r"--timeout"),
    ("pd-train plan.json --config run.yaml --export file/x", r"--export file/x: cannot be written"),
]


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize(("command", "expected"), WRONG, ids=[c for c, _ in WRONG])
def test_one_line_says_what_is_wrong(command: str, expected: str, folder: Path) -> None:
    done = typed(folder, shlex.split(command), {"PYTHONPATH": str(SUPPORT)})
    assert_one_line(command, done.code, done.error, expected)


def assert_one_line(command: str, code: int, error: str, expected: str) -> None:
    assert code == 2, error
    lines = error.strip().splitlines()
    assert len(lines) == 1, error
    assert lines[0].startswith(f"{command.split()[0]}: ")
    assert re.search(expected, lines[0]), lines[0]


# As rank 0 of one that torchrun would start: what is wrong shows before the ranks meet.
ONE_RANK = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
ONE_RANK |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
WRONG_IN_A_RANK = [
    ("plan.json --config optimizer.yaml", r"optimizer 'SDG': .* no such class; did you mean SGD\?"),
    ("plan.json --config option.yaml", r"optimizer SGD .*learning"),
    ("plan.json --config betas.yaml", r"optimizer Adam .*IndexError"),
    (
        "plan.json --config pattern.yaml",
        r"optimizer.groups.0: '\*.bais' matches no parameter of the model, such as a.linear.weight",
    ),
    ("plan.json --config loss.yaml", r"loss 'cross_entrophy'"),
    ("plan.json --config loss_class.yaml", r"loss torch.nn:CrossEntropyLoss: this is a class"),
    ("plan.json --config no_model.yaml", r"has no 'Noisi'; did you mean 'Noisy'"),
    ("plan.json --config no_module.yaml", r"there is no module small_model in"),
    ("plan.json --config no_data.yaml", r"user:rubbish: the training set, a int, lacks __len__"),
    ("plan.json --config too_large.yaml", r"60 examples do not fill a batch of 4000"),
    (
        "plan.json --config one_left.yaml",
        r"1 in place of 59 examples, \S+ Noisy .*more than 1 value.*; write drop_last: true",
    ),
    ("other.json --config run.yaml", r"made for another model: node3 is 'ReLU\(\)' in the plan"),
    ("other.json --config one_left.yaml", r"train: this plan was made for another model: node3"),
    ("plan.json --config run.yaml --device cuda", r"--device cuda: torch sees no GPU"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "expected"), WRONG_IN_A_RANK, ids=[words for words, _ in WRONG_IN_A_RANK]
)
def test_one_line_says_what_is_wrong_with_a_run(words: str, expected: str, folder: Path) -> None:
    if "--device" in words and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = f"pd-train {words}"
    done = typed(folder, shlex.split(command), {**ONE_RANK, "PYTHONPATH": str(SUPPORT)})
    assert_one_line(command, done.code, done.error, expected)


WRONG_TOGETHER = [
    ("plan.json --config vector.yaml -o vector", r"vector.*scalar"),
    ("plan.json --config late.yaml -o late", r"user.py:\d+: KeyError"),
    ("plan.json --config muon.yaml -o muon", r"optimizer Muon: .* write others: \{lr: 0.001\} .*"),
    ("plan.json --config steps.yaml -o steps", r"scheduler StepLR .*ZeroDivisionError"),
    ("plan.json --config nan.yaml -o nan", r"loss of minibatch \d+ in epoch \d is nan"),
    ("plan.json --config run.yaml -o none --resume", r"--resume: there is no checkpoint"),
]


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "expected"), WRONG_TOGETHER, ids=[words for words, _ in WRONG_TOGETHER]
)
def test_two_workers_say_it_once(words: str, expected: str, folder: Path) -> None:
    command = f"pd-train {words}"
    done = typed(folder, command.split(), {"PYTHONPATH": str(SUPPORT)})
    assert_one_line(command, done.code, without_progress(done.error), expected)


def without_progress(error: str) -> str:
    """What a run that goes well would say is not there."""
    lines = error.splitlines()
    return "\n".join(line for line in lines if not line.startswith(("training: ", "epoch ")))


@pytest.mark.thorough
@pytest.mark.slow
def test_two_programs_say_it_once_and_are_gone(folder: Path) -> None:
    words, expected = WRONG_TOGETHER[0]
    command = f"pd-train {words}"
    process = start(folder, command.split(), {"PYTHONPATH": str(SUPPORT)})
    _, error = process.communicate(timeout=100)
    assert_one_line(command, process.returncode, without_progress(error), expected)
    assert nobody_left(process.pid)


LAUNCHED = {
    "torchrun": "torchrun --standalone --nproc-per-node=3 --no-python",
    "mpirun": "mpirun --allow-run-as-root --oversubscribe -n 3",
}


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHED)
def test_more_ranks_than_the_plan_has(launcher: str, folder: Path) -> None:
    words = [*LAUNCHED[launcher].split(), "pd-train", "plan.json", "--config", "run.yaml"]
    process = start(folder, words, {"PYTHONPATH": str(SUPPORT), "PATH": path()})
    _, error = process.communicate(timeout=100)
    said = [line for line in error.splitlines() if "pd-train: " in line]
    assert process.returncode != 0
    assert len(said) == 1, error
    assert "the plan is for 2 workers and 3 were started" in said[0]


def path() -> str:
    import sys

    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.thorough
@pytest.mark.slow
def test_a_worker_killed_in_training_is_named_and_nobody_is_left(folder: Path) -> None:
    process = start(
        folder,
        ["pd-train", "plan.json", "--config", "slow.yaml", "-o", "slow", "--epochs", "50"],
        {"PYTHONPATH": str(SUPPORT)},
    )
    try:
        metrics = folder / "slow/metrics.jsonl"
        wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0)
        victim = children(process.pid)[1]
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        _, error = process.communicate(timeout=60)
        assert time.monotonic() - killed < 60
    finally:
        process.kill()
    said = [line for line in error.splitlines() if line.startswith("pd-train: ")]
    assert process.returncode == 1
    (line,) = said
    where = r"( in epoch \d+ at 1\S+, minibatch \d+)?"  # if it had come to its first action
    assert re.fullmatch(f"pd-train: rank 1 was killed by SIGKILL{where}; all workers stopped", line)
    assert nobody_left(process.pid)


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_end_with_the_command_that_started_them(how: signal.Signals, folder: Path) -> None:
    words = f"pd-train plan.json --config slow.yaml -o slow{how} --epochs 50".split()
    command = begin(folder, words, {"PYTHONPATH": str(SUPPORT)})
    wait_for(lambda: (folder / f"slow{how}/metrics.jsonl").exists())
    workers = children(command.pid)
    assert len(workers) == 2
    os.kill(command.pid, how)
    assert command.done(60).code != 0
    wait_for(lambda: not any(alive(worker) for worker in workers))


@pytest.mark.slow
def test_planning_ends_at_once_when_interrupted(folder: Path, tmp_path: Path) -> None:
    """Wherever it stands: in compiled code, too, where an exception would get lost, and while it
    imports modules, where one did get lost on a busy machine.
    """
    wide = [f"n{n} -- Linear -- {NODE}" for n in range(3000)]
    edges = [f"\tn{n} -- n{m}" for n in range(2999) for m in {n + 1, min(n + 3, 2999)}]
    (tmp_path / "graph.txt").write_text(graph_of(*wide, *edges))
    words = ["pd-optimize", "graph.txt", "--machines", "8,8,8", "--bandwidth", "1GB,1GB,1GB"]
    for delay in (0.0, 0.5, 1.0, 1.5):
        process = start(tmp_path, words)
        maps = Path(f"/proc/{process.pid}/maps")
        wait_for(lambda maps=maps: "pydantic_core" in maps.read_text())
        time.sleep(delay)
        os.kill(process.pid, signal.SIGINT)
        _, error = process.communicate(timeout=60)
        assert (process.returncode, error) == (130, "\npd-optimize: interrupted\n")


def children(parent: int) -> list[int]:
    """The worker processes of a command, in the order of their start."""
    out = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True, check=True
    )
    return sorted(int(pid) for pid in out.stdout.split())


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def nobody_left(session: int) -> bool:
    """Whether no process of the command's session is alive any more."""
    out = subprocess.run(
        ["ps", "-o", "pid=", "--sid", str(session)], capture_output=True, text=True, check=False
    )
    return not any(alive(int(pid)) for pid in out.stdout.split())


def wait_for(condition: object, seconds: float = 90.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)
