import io
import json
import shutil
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import Mock

import click
import pytest
from profiled import MACHINE, profile, profile_of

from pipedream.graph.model import format_graph, read_graph
from pipedream.graph.plan import read_plan
from pipedream.graph.profile import ProfiledProcess, write_profile
from pipedream.optimizer.cli.command import main, typed_options
from pipedream.optimizer.cli.output import next_step
from pipedream.optimizer.cli.task import make_task

TRANSLATION = Path(__file__).parents[1] / "translation.txt"
LEVELS = ("--machines", "2,2", "--bandwidth", "1GB,500MB")


def program(*arguments):
    """Runs the real program, which takes a second to start."""
    command = [Path(sys.executable).with_name("pd-optimize"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def pd_optimize(*arguments, cwd="."):
    """Runs the program's `main` in this process; returns what `program` would."""
    words = list(map(str, arguments))
    out, error = io.StringIO(), io.StringIO()
    with chdir(cwd), redirect_stdout(out), redirect_stderr(error), pytest.raises(SystemExit) as end:
        main(words, prog_name="pd-optimize")
    return subprocess.CompletedProcess(words, end.value.code, out.getvalue(), error.getvalue())


@pytest.mark.slow
def test_writes_plan_graph_and_picture_and_prints_a_table(tmp_path):
    done = program(TRANSLATION, *LEVELS, "-o", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    plan = read_plan(tmp_path / "out" / "plan.json")
    assert plan.cluster.machines == (2, 2)
    assert plan.predicted.cost_model == "network"
    assert plan.workers == 4
    staged = read_graph(tmp_path / "out" / "graph.txt")
    assert {name: node.stage for name, node in staged.nodes.items()} == plan.stage_of
    assert all(staged.nodes[name].stage == 0 for name in ("in0", "in1", "in2"))
    assert staged.nodes["hid"].stage == staged.nodes["enc"].stage
    assert (tmp_path / "out" / ("graph.svg" if shutil.which("dot") else "graph.gv")).exists()
    for word in ("stage", "one worker", "data parallelism", "times as fast", "Written:"):
        assert word in done.stdout
    assert done.stdout.endswith(f"Next: pd-train {tmp_path}/out/plan.json --config CONFIG.yaml\n")
    assert max(map(len, done.stdout.partition("Written:")[0].splitlines())) <= 121


def test_how_backward_passes_divide_comes_from_the_profile(tmp_path):
    graph = read_graph(TRANSLATION)
    (tmp_path / "graph.txt").write_text(format_graph(graph))
    write_profile(profile_of(graph), tmp_path / "profile.json")
    context = click.Context(main)
    main.parse_args(context, [str(tmp_path / "graph.txt"), *LEVELS])
    found = make_task(typed_options(context)).request.graph
    assert {node.kept_bytes for node in found.nodes.values()} == {30}
    for name, node in found.nodes.items():
        assert node.backward_input_seconds == pytest.approx(graph.nodes[name].backward_seconds / 2)


_NAMES = read_graph(TRANSLATION).order
PROCESS = ProfiledProcess(
    baseline_bytes=10**9, gaps={_NAMES[1]: (0.25, 0.25), _NAMES[len(_NAMES) // 2]: (1.0, 1.0)}
)


def _profiled_on(device, folder, process=None):
    graph = read_graph(TRANSLATION)
    (folder / "graph.txt").write_text(format_graph(graph))
    machine = MACHINE.model_copy(update={"device": device})
    write_profile(
        profile_of(graph).model_copy(update={"machine": machine, "process": process}),
        folder / "profile.json",
    )
    return folder / "graph.txt"


@pytest.mark.parametrize(
    ("device", "options", "left"),
    [
        ("cuda", (), 4e9),
        ("cuda", ("--room", "3GB"), 3e9),
        ("cuda", ("--room", "0"), 6e9),
        ("cpu", (), 6e9),
    ],
)
def test_not_all_of_a_gpu_is_for_the_model(tmp_path, device, options, left):
    """Contexts and buffers of NCCL are in no profile: plans that filled a GPU ran out of memory."""
    context = click.Context(main)
    path = _profiled_on(device, tmp_path)
    main.parse_args(context, [str(path), *LEVELS, "--memory", "6GB", *options])
    request = make_task(typed_options(context)).request
    assert request.device_types.smallest_memory == request.left_for_model == left


@pytest.mark.parametrize(
    ("options", "left", "measured"),
    [
        ((), 5e9, True),
        (("--room", "2GB"), 4e9, True),
        (("--speed", "0.5"), 5e9, True),
        (("--speed", "1000"), 6e9, False),  # no such device: what is true of this allocator is not
    ],
)
def test_a_process_takes_what_was_measured_of_each_device(tmp_path, options, left, measured):
    context = click.Context(main)
    path = _profiled_on("cpu", tmp_path, PROCESS)
    main.parse_args(context, [str(path), *LEVELS, "--memory", "6GB", *options])
    request = make_task(typed_options(context)).request
    assert request.left_for_model == left
    gaps = {(0.25, 0.25), (1.0, 1.0)} if measured else set()
    assert set(request.settings.gaps.values()) == gaps
    assert request.settings.read_ahead == (2 if measured else 0)


def test_the_plan_says_what_a_process_holds(tmp_path):
    path = _profiled_on("cpu", tmp_path, PROCESS)
    done = pd_optimize(path, *LEVELS, "-o", tmp_path / "out")
    report = " ".join(done.stdout.split())
    assert "1 GB more of each device are for Python and torch (--room)." in report
    plan = read_plan(tmp_path / "out" / "plan.json")
    assert plan.predicted.process_bytes == 10**9
    for stage in plan.stages:
        assert stage.memory.passing / 4 <= stage.memory.allocator <= stage.memory.passing
        assert stage.memory_bytes == pytest.approx(stage.memory.total)


def test_what_is_not_the_models_stands_in_the_report_and_the_errors(tmp_path):
    path = _profiled_on("cuda", tmp_path)
    with_limit = (path, *LEVELS, "--memory")
    report = " ".join(pd_optimize(*with_limit, "1TB").stdout.split())
    assert "2 GB more of each device are for CUDA and NCCL (--room)." in report
    done = pd_optimize(*with_limit, "2GB")
    assert done.returncode == 2
    assert done.stderr.startswith("pd-optimize: --room 2 GB: a device has no more memory than that")
    done = pd_optimize(*with_limit, "2000001kB")
    assert "--memory 2 GB: no plan fits; the closest needs 2." in done.stderr
    assert ", 2 GB for CUDA and NCCL (--room); give at least --memory " in done.stderr
    least = done.stderr.rpartition("give at least --memory ")[2].split(",")[0].split()[0]
    assert pd_optimize(*with_limit, least, "-o", tmp_path / "plan").returncode == 0
    assert read_plan(tmp_path / "plan/plan.json").asked.memory == least


def test_one_stage_is_called_data_parallelism(tmp_path):
    done = pd_optimize(TRANSLATION, "--machines", "2", "--bandwidth", "1TB", "-o", tmp_path)
    assert "1 stage: this is data parallelism; add --straight for a pipeline" in done.stdout


def test_the_next_command_names_the_run_config_that_was_profiled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = Mock(stages=[1, 2])
    before = next_step(plan, "run.yaml").named(Path("plan"))
    Path("run.yaml").touch()
    assert before == "Next: pd-train plan/plan.json --config CONFIG.yaml"
    after = next_step(plan, "run.yaml").named(Path("plan"))
    assert after == "Next: pd-train plan/plan.json --config run.yaml"


@pytest.mark.slow
def test_the_graph_keeps_its_text_but_for_the_stages(tmp_path):
    pd_optimize(TRANSLATION, *LEVELS, "-o", tmp_path)
    before, after = read_graph(TRANSLATION), read_graph(tmp_path / "graph.txt")
    assert format_graph(after.with_stages({})) == format_graph(before)
    assert after.fingerprint == before.fingerprint


@pytest.mark.thorough
def test_planning_a_planned_graph_again_gives_the_same(tmp_path):
    for source, target in ((TRANSLATION, "a"), (tmp_path / "a" / "graph.txt", "b")):
        assert pd_optimize(source, *LEVELS, "-o", tmp_path / target).returncode == 0
    first, second = (json.loads((tmp_path / name / "plan.json").read_text()) for name in "ab")
    assert first == second


@pytest.mark.thorough
def test_the_plan_carries_its_simulated_time_and_timeline_draws_it(tmp_path):
    done = pd_optimize(TRANSLATION, *LEVELS, "--timeline", "-o", tmp_path)
    assert done.returncode == 0
    plan = read_plan(tmp_path / "plan.json")
    simulated = plan.predicted.simulated
    assert simulated.seconds_per_minibatch >= plan.predicted.seconds_per_minibatch * 0.99
    assert f"{1e3 * simulated.seconds_per_minibatch:.4g} ms" in done.stdout
    for picture in ("timeline.png", "memory.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    pd_optimize(TRANSLATION, *LEVELS, "--update-rate", "100MB", "-o", tmp_path)
    slower = read_plan(tmp_path / "plan.json").predicted.simulated
    assert slower.seconds_per_minibatch > simulated.seconds_per_minibatch


@pytest.mark.thorough
def test_compare_prints_a_table_and_writes_it_and_the_timelines(tmp_path):
    done = pd_optimize(TRANSLATION, *LEVELS, "--compare", "--microbatches", "8", "-o", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("PipeDream", "Alpa", "straight", "GPipe", "equal parameters", "data parallelism"):
        assert name in done.stdout
    assert "of batches of 8" in done.stdout
    assert max(map(len, done.stdout.partition("Written:")[0].splitlines())) <= 121
    assert len((tmp_path / "compare.csv").read_text().splitlines()) == 8
    assert (tmp_path / "compare.png").exists()


@pytest.mark.thorough
def test_sweep_prints_a_table_and_writes_it_and_the_picture(tmp_path):
    done = pd_optimize(TRANSLATION, *LEVELS, "--sweep", "1..6", "-o", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    rows = (tmp_path / "sweep.csv").read_text().splitlines()[1:]
    assert [row.split(",")[0] for row in rows] == ["1", "2", "4", "6"]
    assert "2,3" in done.stdout
    assert (tmp_path / "sweep.png").exists()


@pytest.mark.slow
def test_flags_reach_the_planner(tmp_path):
    shared = ("--machines", "4", "--bandwidth", "1GB", "-o", tmp_path)
    flags = ("--cost-model", "released", "--activation-compression", "2", "--straight")
    assert pd_optimize(TRANSLATION, *shared, *flags, "--schedule", "flush").returncode == 0
    plan = read_plan(tmp_path / "plan.json")
    assert plan.replicas == (1, 1, 1, 1)
    assert plan.schedule == "flush"
    assert plan.predicted.cost_model == "released"
    assert pd_optimize(TRANSLATION, *shared, "--memory", "50MB").returncode == 0
    assert all(s.memory_bytes <= 50e6 for s in read_plan(tmp_path / "plan.json").stages)
    slow = ("--machines", "4", "--bandwidth", "1kB", "-o", tmp_path, "--fewer-machines")
    assert pd_optimize(TRANSLATION, *slow).returncode == 0
    assert read_plan(tmp_path / "plan.json").workers < 4


@pytest.mark.slow
def test_latency_reaches_the_planner_and_the_plan(tmp_path):
    shared = (TRANSLATION, *LEVELS, "-o", tmp_path, "--objective", "latency")
    done = pd_optimize(*shared, "--microbatches", "8", "--epsilon", "0.001", "--layers", "4")
    assert (done.returncode, done.stderr) == (0, "")
    plan = read_plan(tmp_path / "plan.json")
    predicted = plan.predicted
    assert (plan.schedule, predicted.objective, predicted.microbatches) == ("flush", "latency", 8)
    assert predicted.latency_seconds == pytest.approx(8 * predicted.seconds_per_minibatch)
    assert "per batch" in done.stdout


@pytest.mark.slow
def test_an_export_lies_beside_the_plan_and_needs_the_profile(tmp_path):
    shutil.copy(TRANSLATION, tmp_path / "graph.txt")
    arguments = (tmp_path / "graph.txt", *LEVELS, "--export", "torch", "-o", tmp_path)
    done = pd_optimize(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"pd-optimize: --export torch needs {tmp_path}/profile.json")
    graph = read_graph(tmp_path / "graph.txt")
    write_profile(profile_of(graph), tmp_path / "profile.json")
    done = pd_optimize(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"Exported: {tmp_path}/export-torch.json" in done.stdout
    stages = json.loads((tmp_path / "export-torch.json").read_text())["stages"]
    assert len(stages) == len(read_plan(tmp_path / "plan.json").stages)


def test_an_export_names_the_order_beside_it(make_graph, tmp_path):
    graph = make_graph("a b c", "a-b b-c")
    (tmp_path / "graph.txt").write_text(format_graph(graph))
    write_profile(profile_of(graph), tmp_path / "profile.json")
    cluster = ("--machines", "2", "--bandwidth", "1TB", "--straight")
    flush = ("--schedule", "flush", "--microbatches", "4", "--export", "torch", "-o", tmp_path)
    done = pd_optimize(tmp_path / "graph.txt", *cluster, *flush)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"Exported: {tmp_path}/export-torch.json, export-torch.csv\n" in done.stdout
    assert len((tmp_path / "export-torch.csv").read_text().splitlines()) == 2
    order = json.loads((tmp_path / "export-torch.json").read_text())["order"]
    assert (order["file"], order["microbatches"]) == ("export-torch.csv", 4)


@pytest.mark.slow
def test_by_default_the_plan_lies_beside_the_graph(tmp_path):
    shutil.copy(TRANSLATION, tmp_path / "graph.txt")
    assert pd_optimize(tmp_path / "graph.txt", *LEVELS).returncode == 0
    assert (tmp_path / "plan" / "plan.json").exists()


CLUSTERS = Path(__file__).parents[3] / "configs" / "clusters"


@pytest.mark.slow
def test_a_cluster_file_is_planned_for_and_lies_in_the_plan(tmp_path):
    from pipedream.graph.cluster import read_cluster

    file = CLUSTERS / "measured.yaml"
    assert pd_optimize(TRANSLATION, "--cluster", file, "-o", tmp_path).returncode == 0
    plan = read_plan(tmp_path / "plan.json")
    assert plan.cluster == read_cluster(file)
    assert plan.predicted.cost_model == "network"
    flags = ("--cluster", CLUSTERS / "two_machines.yaml", "-o", tmp_path, "--cost-model", "paper")
    done = pd_optimize(TRANSLATION, *flags)
    assert done.returncode == 0
    assert read_plan(tmp_path / "plan.json").predicted.cost_model == "paper"
    assert "Cost model paper: a formula" in done.stdout


def test_latencies_have_a_short_form(tmp_path):
    flags = ("--latency", "10us,1ms", "--cost-model", "measured", "-o", tmp_path)
    assert pd_optimize(TRANSLATION, *LEVELS, *flags).returncode == 0
    plan = read_plan(tmp_path / "plan.json")
    assert plan.cluster.latency == (1e-5, 1e-3)
    assert plan.predicted.cost_model == "measured"


WRONG = {
    "no machines": (["--bandwidth", "1GB"], "Missing option '--machines': give --machines and"),
    "both": (
        [*LEVELS, "--cluster", CLUSTERS / "measured.yaml"],
        "and --machines both say what the cluster is: give one of them",
    ),
    "latency beside": (
        ["--latency", "1us", "--cluster", CLUSTERS / "measured.yaml"],
        "and --latency both say",
    ),
    "latency": ([*LEVELS, "--latency", "1us,soon"], "--latency: 'soon' is not a time: write 20us"),
    "latencies": (
        [*LEVELS, "--latency", "1us"],
        "--latency 1us: 2 levels of machines but 1 latencies",
    ),
    "no cluster": (["--cluster", "none.yaml"], "none.yaml: cannot be read: No such file"),
    "not one": (
        ["--cluster", "graph.txt"],
        "graph.txt: this is a graph: pd-optimize takes it as GRAPH",
    ),
    "levels": (["--machines", "2,2", "--bandwidth", "1GB"], "2 levels of machines but 1 bandwidth"),
    "no machine": (["--machines", "0", "--bandwidth", "1GB"], "at least 1 machine"),
    "machines": (["--machines", "two", "--bandwidth", "1GB"], "--machines two: give whole numbers"),
    "bandwidth": (
        ["--machines", "2", "--bandwidth", "fast"],
        "'fast' is not an amount",
    ),
    "negative": (
        ["--machines", "2", "--bandwidth", "-1GB"],
        "'-1GB' is not an amount",
    ),
    "no bandwidth": (["--machines", "2"], "Missing option '--bandwidth'"),
    "model": ([*LEVELS, "--cost-model", "best"], "'--cost-model': 'best' is not one of"),
    "schedule": ([*LEVELS, "--schedule", "zigzag"], "'--schedule': 'zigzag' is not one of"),
    "microbatches": ([*LEVELS, "--microbatches", "4"], "--microbatches needs --objective latency"),
    "few microbatches": (
        [*LEVELS, "--schedule", "2bw", "--microbatches", "2"],
        "--microbatches 2: with --schedule 2bw the best plan",
    ),
    "latency of another": (
        [*LEVELS, "--objective", "latency", "--microbatches", "4", "--schedule", "2bw"],
        "for the schedules flush and gpipe: leave out --schedule 2bw",
    ),
    "compression": ([*LEVELS, "--activation-compression", "0"], "0.0 is not in the range"),
    "compression in runs": ([*LEVELS, "--activation-compression", "2"], "is for formulas"),
    "memory": ([*LEVELS, "--memory", "lots"], "--memory: 'lots' is not an amount of bytes"),
    "update rate": ([*LEVELS, "--update-rate", "0"], "--update-rate: '0' is not a positive amount"),
    "sweep": ([*LEVELS, "--sweep", "64"], "--sweep 64: give the fewest and the most workers"),
    "too little": ([*LEVELS, "--memory", "1kB"], "--memory 1 kB: no plan fits"),
    "straight": (
        ["--machines", "99", "--bandwidth", "1GB", "--straight"],
        "--straight: 99 devices but only 7 nodes",
    ),
    "straight layers": (
        [*LEVELS, "--straight", "--objective", "latency", "--microbatches", "4", "--layers", "3"],
        "--straight: 4 devices but only 3 layers",
    ),
    "no batch": ([*LEVELS, "--objective", "latency"], "add --microbatches B"),
    "no latency": ([*LEVELS, "--epsilon", "1"], "--epsilon needs --objective latency"),
    "stashing": (
        [
            *LEVELS,
            "--objective",
            "latency",
            "--microbatches",
            "2",
            *["--schedule", "weight-stashing"],
        ],
        "--objective latency plans for the schedules flush and gpipe",
    ),
    "output": ([*LEVELS, "-o", "/dev/null/x"], "-o /dev/null/x: cannot be written"),
    "unknown": ([*LEVELS, "--fast"], "No such option"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_flag_is_one_line(case, tmp_path):
    arguments, message = WRONG[case]
    shutil.copy(TRANSLATION, tmp_path / "graph.txt")
    done = pd_optimize("graph.txt", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("pd-optimize: ")
    assert message in done.stderr


def test_a_missing_or_broken_graph_is_one_line(tmp_path):
    done = pd_optimize(tmp_path / "none.txt", *LEVELS)
    assert done.returncode == 2
    assert (
        done.stderr
        == f"pd-optimize: {tmp_path}/none.txt: cannot be read: No such file or directory\n"
    )
    broken = tmp_path / "graph.txt"
    broken.write_text(TRANSLATION.read_text() + "\n\tout -- nowhere\n")
    done = pd_optimize(broken, *LEVELS)
    assert done.returncode == 2
    assert done.stderr.endswith("edge out -- nowhere: there is no node nowhere\n")
    assert done.stderr.startswith(f"pd-optimize: {broken}:")


def test_help_loads_neither_torch_nor_numpy():
    """tests/test_packaging.py has the time that it takes."""
    code = (
        "import sys; import pipedream.optimizer.cli.command;"
        "print([name for name in ('torch', 'numpy', 'networkx') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.thorough
def test_planning_needs_no_torch(tmp_path):
    code = (
        "import sys; from pipedream.optimizer.cli.command import main\n"
        "try: main()\n"
        "finally: print('torch' in sys.modules)"
    )
    arguments = [TRANSLATION, *LEVELS, "-o", tmp_path]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.thorough
def test_a_sweep_of_which_nothing_fits_says_so_without_a_warning(tmp_path):
    short = ("--machines", "2", "--bandwidth", "1GB", "--straight", "--sweep", "900..901")
    done = program(TRANSLATION, *short, "-o", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("no plan fits") == 2


def test_says_what_is_wrong_before_it_plans(tmp_path, monkeypatch):
    from click.testing import CliRunner

    from pipedream.optimizer.search import planner as optimize

    def plans(request):
        raise AssertionError("planned first")

    monkeypatch.setattr(optimize, "optimize", plans)
    (tmp_path / "file").write_text("")
    graph = shutil.copy(TRANSLATION, tmp_path)
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "profile.json"
    write_profile(profile(), other)
    (tmp_path / "other" / "graph.txt").write_text(TRANSLATION.read_text())
    for late in (
        ["-o", tmp_path / "file" / "out"],
        ["--export", "torch"],
        ["--sweep", "5..5"],
        ["--sweep", "1..4096"],
        ["--weight-prediction", "--schedule", "flush"],
        ["--error-feedback", "--schedule", "gpipe"],
        ["--error-feedback", "--weight-prediction"],
        ["--basis-rotation", "--optimizer", "sgd"],
        ["--basis-rotation"],
    ):
        done = CliRunner().invoke(main, [str(word) for word in (graph, *LEVELS, *late)])
        assert done.exit_code == 2
    words = (tmp_path / "other" / "graph.txt", *LEVELS, "--export", "torch")
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code == 2
    assert "profile of another graph" in done.output


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (("--bandwidth", "10"), "--bandwidth 10 is 10 bytes: add a unit, such as 10GB"),
        (("--bandwidth", "12.5"), "--bandwidth 12.5 is 12.5 bytes: add a unit, such as 12.5GB"),
        (("--bandwidth", "1GB", "--memory", "16"), "--memory 16 is 16 bytes: add a unit"),
    ],
)
def test_a_number_that_lacks_its_unit_is_noticed(typed, told, tmp_path):
    done = pd_optimize(TRANSLATION, "--machines", "2", *typed, "-o", tmp_path)
    assert done.returncode == 2
    assert told in done.stderr


def test_the_folder_of_the_graph_will_do(tmp_path):
    shutil.copy(TRANSLATION, tmp_path / "graph.txt")
    done = pd_optimize(tmp_path, "--machines", "2", "--bandwidth", "1GB", "-o", tmp_path / "plan")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "plan/plan.json").exists()


@pytest.mark.thorough
def test_who_reads_only_the_first_line_has_a_plan_all_the_same(tmp_path):
    """`pd-optimize ... | head` ended before the plan was written, with a traceback."""
    command = [Path(sys.executable).with_name("pd-optimize"), TRANSLATION, *LEVELS, "-o", tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        running.stdout.readline()
        running.stdout.close()
        assert running.stderr.read() == b""
    assert (tmp_path / "plan.json").exists()


@pytest.mark.slow
def test_devices_that_are_faster_than_the_one_profiled(tmp_path):
    """`What would I get on 16 GPUs` had no answer without one of them."""
    asked = (TRANSLATION, "--machines", "2", "--bandwidth", "1TB")
    for speed, folder in (("1", "as"), ("4", "faster")):
        done = pd_optimize(*asked, "--speed", speed, "-o", tmp_path / folder, "--sweep", "1..2")
        assert done.returncode == 0, done.stderr
    here, there = (
        read_plan(tmp_path / folder / "plan.json").predicted.one_worker_seconds
        for folder in ("as", "faster")
    )
    assert here == pytest.approx(4 * there)
    assert "--speed" in pd_optimize(*asked[:1], "--cluster", "x.yaml", "--speed", "2").stderr
    assert pd_optimize(*asked, "--speed", "0").returncode == 2
