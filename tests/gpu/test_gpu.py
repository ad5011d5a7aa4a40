"""What needs a GPU; `scripts/gpu_check.sh` runs this selection. Skipped where there is none."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import small_models
import torch
from click.testing import CliRunner
from divided import executed_by, wrong_strategies
from job_cases import CASES, TYPES, assert_learned_alike, on_gpus, ordered, straight
from plans import cut, make_plan
from torch.nn.functional import scaled_dot_product_attention
from training import losses, run_jobs, weights

from pipedream.capture.export import capture
from pipedream.capture.sources.load import load_config
from pipedream.graph.model import read_graph
from pipedream.graph.placements.operators import read_operators
from pipedream.graph.placements.placement import Shard
from pipedream.graph.run_config import DataFactory, Factory, OptimizerConfig, RunConfig
from pipedream.profiler.cli import main as pd_profile
from pipedream.runtime.engine.action_times import ActionTimes
from pipedream.runtime.run.job import Job
from pipedream.runtime.supervise.device_progress import DeviceProgress
from pipedream.schedule.action import Action, Kind, parse_action
from pipedream.sharding.rules import strategies

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]
FEW = {name: CASES[name] for name in ("every schedule", "replicas", "orders", "meshes")}
"""What differs for the device; communicators do not, with gloo."""
SUPPORT = Path(small_models.__file__).parent


def config_for(model: str) -> RunConfig:
    return RunConfig(
        format="pipedream-run/1",
        model=Factory(source=f"small_models:{model}"),
        data=DataFactory(source="small_models:regression"),
        loss="mse_loss",
        optimizer=OptimizerConfig(name="SGD", args={"lr": 0.1, "momentum": 0.9}),
        batch_size=4,
        dtype="float64",
    )


@pytest.mark.parametrize("case", FEW | TYPES)
def test_ranks_that_share_a_gpu_train_as_they_do_on_cpus(case: str, tmp_path: Path) -> None:
    """gloo, with every message through host memory, and the same losses and weights."""
    jobs = (FEW | TYPES)[case](tmp_path)
    others = on_gpus(jobs)
    run_jobs([*jobs, *others])
    for job, other in zip(jobs, others, strict=True):
        assert_learned_alike(job, other)
        ranks = json.loads((other.run / "summary.json").read_text())["ranks"]
        assert all(rank["peak_memory_bytes"] > 0 for rank in ranks)


def test_a_llama_learns_on_a_gpu_what_it_learns_on_a_cpu(tmp_path: Path) -> None:
    """Its code moves a buffer to the device of its inputs, not the one of the capture."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = RunConfig(
        format="pipedream-run/1",
        model=Factory(
            source="transformers:llama", args={"vocab_size": 64, "intermediate_size": 64, **sizes}
        ),
        data=DataFactory(source="small_models:tokens", args={"examples": 8}),
        loss="small_models:mean_square",
        optimizer=OptimizerConfig(name="SGD", args={"lr": 0.1}),
        batch_size=2,
        microbatches=2,
        dtype="float64",
    )
    loaded = load_config(config, SUPPORT)
    graph = capture(loaded.model, loaded.args, loaded.kwargs).graph
    plan = make_plan(graph, cut(graph, 2), (1, 1), "flush")
    job = Job(plan, config, SUPPORT, tmp_path / "run", schedule="flush", epochs=1)
    (other,) = on_gpus([job])
    run_jobs([job, other])
    assert_learned_alike(job, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [4, 2])
def test_attention_of_gpus_can_be_divided_by_batch_and_heads(
    dtype: torch.dtype, heads: int
) -> None:
    """Whichever kernels torch takes, and their backward passes; `heads` of keys and values. In
    float32 there is none that takes fewer of these.
    """
    torch.manual_seed(0)

    def attend() -> None:
        sizes = ((4, 4, 64, 32), (4, heads, 64, 32), (4, heads, 64, 32))
        inputs = [torch.randn(s, dtype=dtype, device="cuda", requires_grad=True) for s in sizes]
        scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=heads < 4).sum().backward()

    cases = [each for each in executed_by(attend) if "attention" in each.operator.family]
    assert len(cases) == (0 if dtype == torch.float32 and heads < 4 else 2)
    for case in cases:
        close = 1e-4 if dtype == torch.float32 else 2e-2
        assert [why for _, why in wrong_strategies(case, devices=2, close=close)] == []
        placed = {each.inputs[1] for each in strategies(case.operator, 2)}
        assert {Shard(0), Shard(1)} <= placed, (case.operator.family, placed)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_backward_passes_with_attention_divide_on_a_gpu(dtype: str, tmp_path: Path) -> None:
    """torch says of its backward operators there that they draw; so they were refused."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 64, "vocab_size": 64}
    arguments = [f"--arg={name}={size}" for name, size in sizes.items()]
    command = ["transformers:llama", "--input", "16:int64:64", "--batch-size", "2", *arguments]
    result = CliRunner().invoke(
        pd_profile,
        [*command, "--dtype", dtype, "--device", "cuda", "--repeats", "2", "-o", str(tmp_path)],
    )
    assert result.exit_code == 0, result.output
    calls = read_operators(tmp_path / "operators.json").graph.calls
    assert sum("attention" in call.operator.family for call in calls) == 2


def test_recorded_passes_learn_what_others_learn(tmp_path: Path) -> None:
    """CUDA graphs, of whole backward passes and of halves."""
    jobs = [
        *straight(tmp_path, (1, 1), ("flush",), "Normed", evaluate_every=1),
        *ordered(tmp_path, ["zb-v"], clip_norm=0.05),
    ]
    others = [
        replace(job, config=job.config.model_copy(update={"cuda_graphs": True}))
        for job in on_gpus(jobs)
    ]
    run_jobs([*jobs, *others])
    for job, other in zip(jobs, others, strict=True):
        assert_learned_alike(job, other)


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_a_run_that_goes_on_is_the_one_that_was_never_stopped(
    optimizer: str, tmp_path: Path
) -> None:
    """The fused kernels read the optimizer's state, its count of steps among it, on the GPU; the
    last minibatch of an epoch is smaller.
    """
    graph = capture(small_models.Skips(), (torch.randn(4, 6),)).graph
    plan = make_plan(graph, cut(graph, 2), (1, 1))
    config = config_for("Skips").model_copy(
        update={
            "optimizer": OptimizerConfig(name=optimizer, args={"lr": 0.02}),
            "data": DataFactory(source="small_models:regression", args={"examples": 63}),
        }
    )
    whole, begun = (
        Job(plan, config, SUPPORT, tmp_path / name, device="cuda", epochs=2)
        for name in ("whole", "begun")
    )
    run_jobs([whole, replace(begun, epochs=1), replace(begun, resume=True)])
    assert losses(begun) == losses(whole)
    for name, tensor in weights(whole).items():
        assert torch.equal(weights(begun)[name], tensor), name


def test_actions_take_what_they_take_the_device() -> None:
    """Their host is done in microseconds: it only hands over."""
    device = torch.device("cuda", 0)
    times, action = ActionTimes.on(device), parse_action("0F0")
    times.begin()
    began = time.perf_counter()
    for cycles in (20_000_000, 40_000_000):
        begin = times.mark()
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        times.add(action, begin)
    handed_over = time.perf_counter() - began
    times.end()
    done = time.perf_counter()
    first, second = times.events
    assert began <= first.begin < first.end <= second.begin < second.end <= done
    assert second.end - second.begin == pytest.approx(2 * (first.end - first.begin), rel=0.2)
    assert handed_over < (second.end - first.begin) / 2


def test_a_model_is_profiled_with_cuda_events(tmp_path: Path) -> None:
    words = ["torchvision:resnet18", "--device", "cuda", "--batch-size", "8", "-o", str(tmp_path)]
    result = CliRunner().invoke(pd_profile, words)
    assert result.exit_code == 0, result.output
    graph = read_graph(tmp_path / "graph.txt")
    assert sum(node.compute_seconds for node in graph.nodes.values()) > 0
    profile = json.loads((tmp_path / "profile.json").read_text())
    assert torch.cuda.get_device_name() in json.dumps(profile)
    operators = read_operators(tmp_path / "operators.json")
    seconds = sum(profile["totals"][f"{each}_seconds"] for each in ("forward", "backward"))
    assert sum(operators.seconds.values()) == pytest.approx(seconds, rel=0.05)


def test_a_kernel_that_does_not_end_is_noticed_while_the_host_goes_on() -> None:
    """And the thread that waits for it leaves Python's lock to those that say the rank lives."""
    progress = DeviceProgress.of(torch.device("cuda", 0), 4.0)
    assert progress is not None
    progress.words = "at 0F7"
    progress.begin(Action(Kind.FORWARD, 0, 0, 7, 0))
    begin = time.monotonic()
    torch.cuda._sleep(4 * 10**9)  # cycles: some seconds
    progress.given()
    while progress.at is None:
        assert time.monotonic() - begin < 1.0
        time.sleep(0.01)
    found = [progress.look(1.0) for _ in range(4)]
    assert found[-1] == "has not responded for 4 s at 0F7 (on its GPU)"
    torch.cuda.synchronize()
    while progress.at is not None:
        time.sleep(0.01)
    assert progress.look(1.0) is None
