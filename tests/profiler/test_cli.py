from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from commands import Done, but_progress, typed

from pipedream.graph.model import read_graph
from pipedream.graph.placements.operators import Operator, read_operators, write_operators
from pipedream.graph.profile import read_profile
from pipedream.profiler.cli import main
from pipedream.sharding.local_times import LocalTimes
from pipedream.sharding.rules import local_operator, strategies
from pipedream.sharding.rules.strategy import Strategy

Run = Callable[..., tuple[int, str, str]]

USER = """
import torch
from torch import nn

def net(hidden=4, layers=1):
    return nn.Sequential(*[nn.Linear(3, 3) for _ in range(layers)], nn.Linear(3, hidden), nn.ReLU())

def data():
    return [(torch.zeros(3), 0)] * 8, None

class Choosy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
    def forward(self, x):
        if x.sum() > 0:
            return self.layer(x)
        return x

def choosy():
    return Choosy()

class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x
    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient

class Doubling(nn.Linear):
    def __init__(self):
        super().__init__(3, 3)
    def forward(self, x):
        return Doubled.apply(super().forward(x))
"""
CONFIG = """
format: pipedream-run/1
model: {source: "users_net:net", args: {hidden: 5}}
data: {source: "users_net:data"}
batch_size: 6
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """pd-profile in a folder that has the user's module: exit code, stdout, stderr."""
    (tmp_path / "users_net.py").write_text(USER)
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "users_net", raising=False)
    threads = torch.get_num_threads()

    def call(*args: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main.main(list(args), prog_name="pd-profile")
        torch.set_num_threads(threads)
        printed = capsys.readouterr()
        assert isinstance(stop.value.code, int)
        return stop.value.code, printed.out, but_progress(printed.err)

    return call


@pytest.mark.slow
def test_writes_graph_profile_and_picture_and_says_so(run: Run, tmp_path: Path) -> None:
    code, out, err = run(
        *("users_net:net", "-o", "a/b", "--input", "3", "--arg", "layers=2"),
        *("--batch-size", "4", "--shards", "none"),
    )
    assert (code, err) == (0, ""), err
    graph = read_graph(tmp_path / "a/b/graph.txt")
    assert [node.description.partition("(")[0] for node in graph.nodes.values()] == [
        "Input0",
        "Linear",
        "Linear",
        "Linear",
        "ReLU",
    ]
    profile = read_profile(tmp_path / "a/b/profile.json")
    assert profile.graph_fingerprint == graph.fingerprint
    assert (profile.args, profile.batch_size) == ({"layers": 2}, 4)
    assert profile.repeats >= 4
    assert read_operators(tmp_path / "a/b/operators.json").local_seconds == ()
    picture = "graph.svg" if (tmp_path / "a/b/graph.svg").exists() else "graph.gv"
    assert (tmp_path / "a/b" / picture).exists()
    assert (
        f"Written: a/b/graph.txt, profile.json, operators.json, layers.csv, layers.png, {picture}"
        in out
    )
    assert (tmp_path / "a/b/layers.png").read_bytes().startswith(b"\x89PNG")
    rows = (tmp_path / "a/b/layers.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows[1:]] == list(graph.nodes)
    assert all(
        node.parameter_bytes == graph.nodes[node.id].parameter_bytes for node in profile.nodes
    )
    assert "heaviest of 5 nodes" in out
    assert "for a minibatch of 4" in out


@pytest.mark.thorough
def test_graph_txt_has_the_measured_milliseconds(run: Run, tmp_path: Path) -> None:
    assert run("users_net:net", "-o", "out", "--input", "3", "--repeats", "2")[0] == 0
    profile = read_profile(tmp_path / "out/profile.json")
    for node in profile.nodes:
        written = read_graph(tmp_path / "out/graph.txt").nodes[node.id]
        assert written.forward_seconds == pytest.approx(node.forward_seconds.median, abs=6e-7)
        assert written.backward_seconds == pytest.approx(node.backward_seconds.median, abs=6e-7)


@pytest.mark.thorough
def test_operators_take_what_their_layers_take(run: Run, tmp_path: Path) -> None:
    args = ("users_net:net", "-o", "out", "--input", "3", "--batch-size", "4", "--repeats", "2")
    assert run(*args)[0] == 0
    profile = read_profile(tmp_path / "out/profile.json")
    operators = read_operators(tmp_path / "out/operators.json")
    assert operators.fingerprint == profile.graph_fingerprint
    assert operators.batch_size == 4
    assert operators.nodes.keys() == operators.seconds.keys()
    sums = dict.fromkeys(profile.node, 0.0)
    for name, node in operators.nodes.items():
        sums[node] += operators.seconds[name]
    for node in profile.nodes:
        both = node.forward_seconds.median + node.backward_seconds.median
        assert sums[node.id] == pytest.approx(both), node
    write_operators(operators, tmp_path / "again.json")
    assert read_operators(tmp_path / "again.json") == operators


@pytest.mark.slow
@pytest.mark.thorough
def test_local_operators_are_timed(run: Run, tmp_path: Path) -> None:
    """Halves of those that take longest, or what is asked for."""
    args = ("users_net:net", "-o", "out", "--input", "3", "--batch-size", "8", "--repeats", "1")
    assert run(*args, "--shards", "none")[0] == 0
    assert read_operators(tmp_path / "out/operators.json").local_seconds == ()
    assert run(*args)[0] == 0
    operators = read_operators(tmp_path / "out/operators.json")
    timed = LocalTimes.of(operators.local_seconds).seconds
    longest = max(operators.graph.calls, key=lambda call: operators.seconds[call.name]).operator
    halves = {local_operator(longest, each, 2, 0) for each in strategies(longest, 2)}
    assert {longest, *halves} <= timed.keys()
    assert run(*args, "--shards", "4,2")[0] == 0
    operators = read_operators(tmp_path / "out/operators.json")
    times = LocalTimes.of(operators.local_seconds).seconds
    products = [c.operator for c in operators.graph.calls if c.operator.family == "aten.addmm"]
    assert products
    for product in products:
        for chosen, mesh in product_divisions(product):
            local = product
            for strategy, devices in zip(chosen, mesh, strict=True):
                local = local_operator(local, strategy, devices, 0)
            share = LocalTimes(times).share(product, chosen, mesh)
            assert share == (1 if local == product else times[local] / times[product])


def product_divisions(
    product: Operator,
) -> Iterator[tuple[tuple[Strategy, ...], tuple[int, ...]]]:
    """All ways to divide it among two and four devices, of one axis and of two."""
    for devices in (2, 4):
        yield from (((each,), (devices,)) for each in strategies(product, devices))
    for first in strategies(product, 2):
        local = local_operator(product, first, 2, 0)
        yield from (((first, second), (2, 2)) for second in strategies(local, 2))


@pytest.mark.thorough
def test_without_operators_it_says_why_and_leaves_no_old_ones(run: Run, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/operators.json").write_text("of an earlier run")
    code, out, err = run("users_net:Doubling", "-o", "out", "--input", "3", "--repeats", "1")
    assert (code, err) == (0, "")
    (written,) = [line for line in out.splitlines() if line.startswith("Written: ")]
    assert re.search(r"; no operators\.json: .* is code of the user's$", written)
    assert not (tmp_path / "out/operators.json").exists()
    assert (tmp_path / "out/profile.json").exists()


@pytest.mark.thorough
def test_run_config_says_batch_size_and_arguments(run: Run, tmp_path: Path) -> None:
    assert run("run.yaml", "-o", "out", "--repeats", "1")[0] == 0
    profile = read_profile(tmp_path / "out/profile.json")
    assert (profile.batch_size, profile.args) == (6, {"hidden": 5})
    assert profile.nodes[0].outputs[0].shape == (6, 3)
    assert run("run.yaml", "-o", "out", "--repeats", "1", "--batch-size", "2")[0] == 0
    assert read_profile(tmp_path / "out/profile.json").nodes[0].outputs[0].shape == (2, 3)


@pytest.mark.thorough
def test_without_dot_one_line_tells(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    code, out, _ = run("users_net:net", "-o", "out", "--input", "3", "--repeats", "1")
    assert code == 0
    assert (tmp_path / "out/graph.gv").exists()
    assert "the dot program is not installed" in out


WRONG = {
    "no such library model": (["torchvision:resnet51", "-o", "out"], "did you mean 'resnet50'"),
    "no such architecture": (["transformers:gtp2", "-o", "out"], "did you mean 'gpt2'"),
    "no colon": (["resnet50", "-o", "out"], "write torchvision:NAME"),
    "no such module": (["nosuch:net", "-o", "out"], "there is no module nosuch"),
    "no such factory": (["users_net:nett", "-o", "out"], "did you mean 'net'?"),
    "no inputs": (["users_net:net", "-o", "out"], "--input 3x32x32"),
    "inputs that do not fit": (
        ["users_net:net", "-o", "out", "--input", "7"],
        "cannot be captured",
    ),
    "cannot be captured": (
        ["users_net:choosy", "-o", "out", "--input", "3"],
        "users_net.py:16: Choosy cannot be captured",
    ),
    "no config": (["nosuch.yaml", "-o", "out"], "nosuch.yaml: cannot be read"),
    "argument beside a config": (
        ["run.yaml", "-o", "out", "--arg", "hidden=3"],
        "--arg does not go with a run config",
    ),
    "input beside a config": (
        ["run.yaml", "-o", "out", "--input", "3"],
        "--input does not go with a run config",
    ),
    "argument without value": (
        ["users_net:net", "-o", "out", "--arg", "hidden"],
        "--arg hidden: write NAME=VALUE",
    ),
    "argument that is no YAML": (
        ["users_net:net", "-o", "out", "--arg", "hidden=[1"],
        "--arg hidden=[1: '[1' is not a YAML value",
    ),
    "input that means nothing": (
        ["users_net:net", "-o", "out", "--input", "3y4"],
        "--input 3y4: write 3x224x224",
    ),
    "batch size 0": (["users_net:net", "-o", "out", "--batch-size", "0"], "--batch-size"),
    "no repeats": (["users_net:net", "-o", "out", "--repeats", "0"], "--repeats"),
    "shards of one device": (
        ["users_net:net", "-o", "out", "--shards", "2,1"],
        "--shards 2,1: 1 is no division: give 2 or more",
    ),
    "shards that are no numbers": (
        ["users_net:net", "-o", "out", "--shards", "2x4"],
        "--shards 2x4: give numbers of devices, as 2,4,8",
    ),
    "no device": (["users_net:net", "-o", "out", "--device", "tpu9"], "--device tpu9: write cpu"),
    "a device of another kind": (
        ["users_net:net", "-o", "out", "--device", "mps"],
        "--device mps: write cpu",
    ),
    "batch larger than the data": (
        ["run.yaml", "-o", "out", "--batch-size", "99"],
        "8 examples do not fill a batch of 99",
    ),
    "output is a file": (["users_net:net", "-o", "file"], "-o file: this is a file"),
    "output below a file": (["users_net:net", "-o", "file/x"], "-o file/x: cannot be created"),
    "no output": (["users_net:net"], "-o"),
    "no model": (["-o", "out"], "MODEL"),
    "no such option": (["users_net:net", "-o", "out", "--fast"], "--fast"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_every_mistake_is_one_line_and_exit_code_2(run: Run, wrong: str) -> None:
    args, told = WRONG[wrong]
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert err.startswith("pd-profile: ")
    assert told in err
    assert err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_one_line(run: Run) -> None:
    code, _, err = run("users_net:net", "-o", "out", "--device", "cuda:1")
    assert code == 2
    assert err == "pd-profile: --device cuda:1: torch finds no CUDA GPU here; use --device cpu\n"


def test_out_of_memory_is_one_line(run: Run) -> None:
    code, _, err = run(
        "users_net:net", "-o", "out", "--input", "3", "--arg", "hidden=1000",
        "--batch-size", "100000000000",
    )  # fmt: skip
    assert code == 2
    assert err == "pd-profile: out of memory on cpu: choose a smaller --batch-size\n"


def test_help_answers_at_once_and_needs_no_torch() -> None:
    program = (
        "import sys; from pipedream.profiler.cli import main\n"
        "try: main.main(['--help'])\n"
        "finally: assert 'torch' not in sys.modules and 'rich' not in sys.modules"
    )
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--batch-size" in done.stdout
    assert time.perf_counter() - started < 5


MODELS = {
    "vgg16": ["torchvision:vgg16", "--input", "3x32x32"],
    "resnet18": ["torchvision:resnet18", "--input", "3x32x32"],
    "densenet": ["image_models:small_densenet", "--input", "3x32x32"],
    "inception_v3": ["torchvision:inception_v3"],
    "vit_tiny": ["timm:vit_tiny_patch16_224", "--input", "3x224x224"],
    "gpt2": ["transformers:gpt2", "--arg", "n_layer=2", "--arg", "n_embd=32", "--arg", "n_head=2"],
    "bert": [
        "transformers:bert", "--arg", "num_hidden_layers=2", "--arg", "hidden_size=32",
        "--arg", "num_attention_heads=2", "--arg", "intermediate_size=64",
    ],
    "llama": [
        "transformers:llama", "--arg", "num_hidden_layers=2", "--arg", "hidden_size=32",
        "--arg", "num_attention_heads=2", "--arg", "intermediate_size=64",
    ],
}  # fmt: skip
PARAMETERS = {
    "vgg16": 138_357_544,
    "resnet18": 11_689_512,
    "inception_v3": 27_161_264,
}  # as torchvision's documentation gives them


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_real_models_go_through(run: Run, tmp_path: Path, model: str) -> None:
    small = ["--batch-size", "2", "--warmup", "1", "--repeats", "1"]
    if MODELS[model][0].startswith("transformers:"):
        small += ["--arg", "vocab_size=99", "--input", "16:int64"]
    code, _, err = run(*MODELS[model], *small, "-o", "out")
    assert (code, err) == (0, "")
    graph = read_graph(tmp_path / "out/graph.txt")
    profile = read_profile(tmp_path / "out/profile.json")
    assert graph.fingerprint == profile.graph_fingerprint
    assert profile.totals.backward_seconds > 0
    assert all(node.output_bytes > 0 for node in graph.nodes.values() if not node.is_input)
    if model in PARAMETERS:
        assert profile.totals.parameter_bytes == 4 * PARAMETERS[model]


@pytest.mark.thorough
@pytest.mark.slow
def test_as_installed_from_the_users_folder(tmp_path: Path) -> None:
    """The program itself finds a module of the current directory, and is quiet when piped."""
    (tmp_path / "users_net.py").write_text(USER)
    program = Path(sys.executable).parent / "pd-profile"
    done = subprocess.run(
        [program, "users_net:net", "-o", "out", "--input", "3", "--repeats", "1"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, but_progress(done.stderr)) == (0, "")
    assert {"graph.txt", "profile.json"} < {file.name for file in (tmp_path / "out").iterdir()}


@pytest.mark.thorough
@pytest.mark.slow
def test_a_fake_model_is_measured_a_node_at_a_time(run: Run, tmp_path: Path) -> None:
    small = ["--arg", "num_classes=5", "--input", "3x32x32", "--batch-size", "2", "--repeats", "2"]
    code, _, err = run("torchvision:resnet18", *small, "--meta", "-o", "bare")
    assert (code, err) == (0, "")
    assert run("torchvision:resnet18", *small, "-o", "real")[0] == 0
    bare, real = (read_profile(tmp_path / name / "profile.json") for name in ("bare", "real"))
    assert bare.graph_fingerprint == real.graph_fingerprint
    assert [n.saved_bytes for n in bare.nodes] == [n.saved_bytes for n in real.nodes]
    assert bare.stretches == ()
    assert real.stretches


def with_contention(folder: Path, model: str) -> Done:
    """Measured with one more process at work, a program of its own."""
    words = ["pd-profile", model, "--input", "3", "--repeats", "2", "--workers", "2", "-o", "out"]
    return typed(folder, words, seconds=120)


@pytest.mark.thorough
@pytest.mark.slow
def test_others_are_at_work_meanwhile_and_gone_afterwards(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text(
        "import os, torch\n"
        "def net():\n"
        "    open(f'seen-{os.getpid()}', 'w').close()\n"
        "    return torch.nn.Linear(3, 3)\n"
    )
    done = with_contention(tmp_path, "beside:net")
    assert (done.code, but_progress(done.error)) == (0, "")
    assert "2 workers at once" in done.out
    assert read_profile(tmp_path / "out/profile.json").machine.workers == 2
    seen = [int(path.name.partition("-")[2]) for path in tmp_path.glob("seen-*")]
    assert len(seen) == 2
    assert not any(Path(f"/proc/{process}").exists() for process in seen)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_contending_process_that_fails_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text(
        "import os, torch\n"
        "def net():\n"
        "    if os.path.exists('seen'):\n"
        "        raise MemoryError\n"
        "    open('seen', 'w').close()\n"
        "    return torch.nn.Linear(3, 3)\n"
    )
    done = with_contention(tmp_path, "alone:net")
    assert done.code == 2
    assert done.error.startswith("pd-profile: --workers: one of the other processes could not")
    assert len(done.error.splitlines()) == 1


def test_what_can_be_captured_and_not_run_is_one_line(run: Run, tmp_path: Path) -> None:
    """Capture knows shapes alone: an operator that rejects their values ended in a traceback."""
    (tmp_path / "picky.py").write_text(
        "import torch\n"
        "@torch.library.custom_op('pipedream_tests::picky', mutates_args=())\n"
        "def picky(x: torch.Tensor) -> torch.Tensor:\n"
        "    raise RuntimeError('no tiles of 3\\nand much more')\n"
        "picky.register_fake(torch.empty_like)\n"
        "class Net(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return picky(x)\n"
        "class Words(torch.nn.Embedding):\n"
        "    def __init__(self):\n"
        "        super().__init__(4, 2)\n"
    )
    assert run("picky:Net", "--input", "3", "-o", "out") == (
        2, "", "pd-profile: picky:Net cannot run on these inputs: no tiles of 3; in the model "
        "itself, given [32, 3]\n",
    )  # fmt: skip
    code, _, err = run("picky:Words", "--input", "3:int64:9", "-o", "out")
    assert code == 2
    assert "cannot run on these inputs: index out of range in self: give fewer positions" in err
