"""report.html: what stands on it, that names stay text, and how it looks in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import small_models
import torch
from commands import typed
from plans import cut, make_plan
from played import played
from profiled import profile_of, seconds

from pipedream.capture.export import capture
from pipedream.graph.measured_run import MeasuredRank, MeasuredRun
from pipedream.graph.model import Graph, Node, format_graph
from pipedream.graph.plan import Plan, PlanningOptions, Simulated, write_plan
from pipedream.graph.profile import write_profile
from pipedream.graph.run_config import DataFactory, Factory, RunConfig
from pipedream.graph.timeline import Event, draw
from pipedream.runtime.report.page.finished_run import FinishedRun
from pipedream.runtime.report.page.run_page import write_page
from pipedream.runtime.report.utilisation import Utilisation
from pipedream.runtime.run.job import Job
from pipedream.schedule.action import parse_action

SUPPORT = Path(small_models.__file__).parent
CHROMIUM = shutil.which("chromium")
HOSTILE = '"><script>alert(1)</script><img src=x>{{ 7 * 7 }}&amp;'
"""In an element, an attribute, or a template it would be more than text."""

FRAME = """\
<iframe src="run/report.html" style="width: WIDTHpx; height: 900px; border: 0"></iframe>
<p id="said"></p>
<script>
onload = () => {
    const page = frames[0].document, root = page.scrollingElement;
    const images = [...page.images].filter(image => image.naturalWidth > 0);
    said.textContent = `${root.clientWidth} ${root.scrollWidth} ${images.length}`;
};
</script>
"""
"""Says the width of a page, that of its content, and how many pictures are shown."""


class Reader(HTMLParser):
    """The elements of a page, with their attributes and the class of what is around them, and its
    text.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.around: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self._open: list[tuple[str, str | None]] = [("page", None)]
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.around.append((tag, self._open[-1][1]))
        if tag not in ("meta", "img"):
            self._open.append((tag, dict(attrs).get("class")))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def finished(folder: Path, **names: str) -> FinishedRun:
    """A run of two stages, of two replicas and one, with everything beside it that a page shows.

    `names`: of the `model`, a `module`, a `node` and an `argument`.
    """
    plan_folder, run = folder / "plan", folder / "run"
    for each in (plan_folder, run):
        each.mkdir()
    first = names.get("node", "a")
    graph = Graph(
        {
            first: Node(first, "Linear(6, 6)", 2e-3, 4e-3, (96.0,), 144.0),
            "b": Node("b", "Tanh()", 1e-3, 1e-3, (96.0,)),
            "c": Node("c", "Tanh()", 0.0, 0.0, (777.0,)),
        },
        ((first, "b"), ("b", "c")),
    )
    module = {"op": "Linear", "module": names.get("module", "encoder.up")}
    write_profile(profile_of(graph, {first: module}), plan_folder / "profile.json")
    (plan_folder / "graph.txt").write_text(format_graph(graph))
    plan = _plan(graph, first)
    write_plan(plan, plan_folder / "plan.json")
    timeline = {0: [Event(parse_action("0F0"), 0.0, 1.0)]}
    for each in (plan_folder, run):
        draw(timeline, each / "timeline.png", "a timeline")
    losses = [{"epoch": 1, "minibatch": n, "loss": 2.0 - n, "seconds": n} for n in range(2)]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, losses)))
    held_out = {"epoch": 1, "held_out_loss": 1.25, "held_out_accuracy": 0.5}
    (run / "held_out.jsonl").write_text(json.dumps(held_out))
    config = RunConfig.model_construct(
        model=Factory.model_construct(source=names.get("model", "nets:model"), args={"w": "x"}),
        data=DataFactory(source="nets:data", args={names.get("argument", "examples"): 8}),
        batch_size=4,
    )
    job = Job(plan, config, folder, run, plan_folder=plan_folder)
    kinds = {"F": 2.0, "B": 3.0, "RA": 1.0}
    spent = Utilisation(10.0, 500, dict.fromkeys(range(3), kinds), steady=True)
    return FinishedRun(job, _summary(), spent, _measured(plan))


def _plan(graph: Graph, first: str) -> Plan:
    made = make_plan(graph, [[first], ["b", "c"]], (2, 1))
    stages = [stage.model_copy(update={"compute_seconds": 6e-3}) for stage in made.stages]
    predicted = made.predicted.model_copy(
        update={
            "expected_seconds_per_minibatch": 0.01,
            "simulated": Simulated(seconds_per_minibatch=0.01, bubble=0.15),
        }
    )
    asked = PlanningOptions(profile="../plan/profile.json")
    update = {"stages": tuple(stages), "predicted": predicted, "asked": asked, "batch_size": 4}
    return made.model_copy(update=update)


def _measured(plan: Plan) -> MeasuredRun:
    ranks = [
        MeasuredRank(
            rank=rank,
            stage=stage,
            replica=replica,
            minibatches=5,
            forward=seconds(3e-3 + rank * 1e-3),
            backward=seconds(4e-3),
            updates=0,
        )
        for rank, (stage, replica) in enumerate([(0, 0), (0, 1), (1, 0)])
    ]
    return MeasuredRun(
        device="cpu",
        threads=1,
        batch_size=4,
        schedule=plan.schedule,
        seconds_per_minibatch=0.02,
        ranks=tuple(ranks),
        plan=plan,
    )


def _summary() -> dict[str, Any]:
    rank = {
        "replica": 0,
        "peak_memory_bytes": 2e6,
        "predicted_memory_bytes": 1e6,
        "reserved_memory_bytes": None,
        "rest_of_gpu_bytes": None,
        "weight_versions": 2,
        "in_flight": 2,
        "updates_left_out": 0,
    }
    return {
        "minibatches_per_epoch": 2,
        "seconds_per_minibatch": 0.02,
        "expected_seconds_per_minibatch": 0.01,
        "samples_per_second": 200.0,
        "bubble": 0.5,
        "simulated_bubble": 0.15,
        "final_loss": 1.0,
        "held_out_loss": 1.25,
        "held_out_accuracy": 0.5,
        "ranks": [{"rank": n, "stage": n // 2} | rank for n in range(3)],
    }


def written(run: FinishedRun) -> str:
    assert write_page(run)
    return (run.job.run / "report.html").read_text()


HEADINGS = ["Expected and measured time", "Loss", "Plan", "Ranks", "Slowest layers"]


def cells(page: str, *begin: str) -> list[str]:
    """The rest of the only row of a table that begins with these cells."""
    rows = [re.findall(r"<td[^>]*>(.*)</td>", row) for row in re.split("<tr>", page)]
    (found,) = (row[len(begin) :] for row in rows if row[: len(begin)] == list(begin))
    return found


def headings(page: str) -> list[str]:
    return re.findall(r"<h2>(.*)</h2>", page)


def test_everything_that_is_known_stands_on_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = written(finished(tmp_path))
    assert capsys.readouterr().err == ""
    read = Reader(page)
    for text in (
        "nets:model",
        "20 ms",
        "expected 10 ms",
        "200",
        "simulated 15.0%",
        "on rank 0, planned 1 MB",
        "encoder.up: Linear",
        "0-1",
        "96 B",
        "8 ms",  # the slower replica of stage 0
        "+10 ms",
        "75.0%",
        "30.0%",
        "1.2500",
    ):
        assert text in read.texts, text
    assert headings(page) == HEADINGS
    assert len(read.all("img")) == 2
    assert cells(page, "1", "1", "2") == ["2", "b: Linear … c: Linear", "0 B", "–", "6 ms", "9 ms"]
    assert len(page) < 1e6


def test_memory_of_gpus_has_columns_of_its_own(tmp_path: Path) -> None:
    run = finished(tmp_path)
    assert "reserved by torch" not in written(run)
    more = {"reserved_memory_bytes": 3e6, "rest_of_gpu_bytes": 5e8}
    ranks = [rank | more for rank in run.summary["ranks"]]
    page = written(replace(run, summary={**run.summary, "ranks": ranks}))
    for text in ("reserved by torch", "rest on the GPU", "3 MB", "500 MB"):
        assert f">{text}</t" in page
    assert cells(page, "0", "0", "0", "2 MB") == ["1 MB", "3 MB", "500 MB", "2", "2"]


def test_the_page_loads_and_executes_nothing(tmp_path: Path) -> None:
    page = written(finished(tmp_path))
    read = Reader(page)
    used = {name for _, attributes in read.elements for name in attributes}
    assert used.isdisjoint({"href", "srcset", "action", "data"})
    assert not [name for name in used if name.startswith("on")]
    assert not re.search(r"url\(|@import", page)
    assert {name for name, _ in read.elements}.isdisjoint({"script", "link", "iframe", "object"})
    (policy,) = (e["content"] for e in read.all("meta") if "http-equiv" in e)
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    assert all((image["src"] or "").startswith("data:image/png;") for image in read.all("img"))


def test_what_is_wider_than_a_phone_scrolls_in_a_box_of_its_own(tmp_path: Path) -> None:
    """The page itself never scrolls sideways: see test_in_a_browser_it_fits_the_window."""
    read = Reader(written(finished(tmp_path)))
    (viewport,) = (e["content"] for e in read.all("meta") if e.get("name") == "viewport")
    assert viewport == "width=device-width, initial-scale=1"
    for tag in ("table", "img"):
        boxes = [box for name, box in read.around if name == tag]
        assert boxes == ["wide"] * len(boxes) != []
    assert "; scroll it sideways" in read.texts


@pytest.mark.slow
def test_names_of_users_and_files_stay_text(tmp_path: Path) -> None:
    known = Reader(written(finished(tmp_path)))
    names = {"model": HOSTILE, "module": HOSTILE, "argument": HOSTILE}
    folder = tmp_path / "<b>hostile"
    folder.mkdir()
    page = written(finished(folder, **names))
    read = Reader(page)
    assert [name for name, _ in read.elements] == [name for name, _ in known.elements]
    assert page.count(escape(HOSTILE).replace("&quot;", "&#34;")) > 3
    assert "49" not in read.texts

    other = tmp_path / "other"
    other.mkdir()
    run = finished(other, node=HOSTILE)
    (other / "plan/profile.json").unlink()
    assert [name for name, _ in Reader(written(run)).elements] == [n for n, _ in known.elements]


def test_what_there_is_not_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished(tmp_path)
    plan = run.job.plan.model_copy(update={"asked": None})
    summary = {**run.summary, "bubble": None, "final_loss": None, "seconds_per_minibatch": 0.0}
    for key in ("held_out_loss", "held_out_accuracy"):
        del summary[key]
    for name in ("metrics.jsonl", "held_out.jsonl", "timeline.png"):
        (run.job.run / name).unlink()
    (run.job.run / "metrics.jsonl").touch()
    nothing = Utilisation(0.0, 0, {}, steady=False)
    job = replace(run.job, plan=plan, plan_folder=None)
    page = written(FinishedRun(job, summary, nothing, None))
    assert capsys.readouterr().err == ""
    assert headings(page) == ["Plan", "Ranks"]
    assert "<img" not in page
    assert "a Linear" in Reader(page).texts
    assert "time per minibatch" not in page


def test_the_graph_and_the_profile_of_another_plan_are_not_shown(tmp_path: Path) -> None:
    run = finished(tmp_path)
    other = Graph({name: Node(name, "Other()", 1.0) for name in "abc"}, ())
    (tmp_path / "plan/graph.txt").write_text(format_graph(other))
    write_profile(profile_of(other), tmp_path / "plan/profile.json")
    page = written(run)
    assert headings(page) == HEADINGS[:-1]
    assert "a Linear" in Reader(page).texts
    assert "Other" not in page


@pytest.mark.thorough
@pytest.mark.slow
def test_large_pictures_become_small(tmp_path: Path) -> None:
    """The timelines of 32 stages take half a megabyte each, as they are drawn."""
    run = finished(tmp_path)
    drawn = tmp_path / "run/timeline.png"
    draw(played((1,) * 32, 40), drawn, "32 stages")
    shutil.copy(drawn, tmp_path / "plan/timeline.png")
    page = written(run)
    assert len(Reader(page).all("img")) == 2
    assert len(page) < 5e5


def test_a_part_that_cannot_be_made_is_left_out_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished(tmp_path)
    (run.job.run / "metrics.jsonl").write_text("[")
    (tmp_path / "plan/graph.txt").write_text("nonsense\x1b[2J")
    (tmp_path / "plan/profile.json").write_text("{")
    page = written(run)
    assert headings(page) == HEADINGS[:-1]
    assert "<polyline" not in page
    said = capsys.readouterr().err.splitlines()
    assert [line.split(" left out")[0] for line in said] == [
        "pd-train: report.html: names of layers",
        "pd-train: report.html: graph",
        "pd-train: report.html: losses",
    ]
    assert "\x1b" not in "".join(said)


def test_a_page_that_cannot_be_written_stops_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished(tmp_path)
    (run.job.run / "report.html").mkdir()
    assert not write_page(run)
    assert "the page left out: IsADirectoryError" in capsys.readouterr().err


def test_figures_of_another_schedule_or_batch_size_are_called_so(tmp_path: Path) -> None:
    run = finished(tmp_path)
    job = replace(run.job, schedule="flush")
    page = written(
        replace(run, job=replace(job, plan=job.plan.model_copy(update={"batch_size": 9})))
    )
    assert "minibatches of 9" in page
    assert "trained in another way" in page
    assert "expected 10 ms" not in page
    assert "Expected and measured time" not in page
    assert len(Reader(page).all("img")) == 1


def test_the_simulated_timeline_of_an_earlier_plan_is_not_shown(tmp_path: Path) -> None:
    run = finished(tmp_path)
    write_plan(run.job.plan, tmp_path / "plan/plan.json")
    assert len(Reader(written(run)).all("img")) == 1


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a small run by the command."""
    folder = tmp_path_factory.mktemp("page")
    graph = capture(small_models.Noisy(), (torch.randn(4, 6),)).graph
    write_plan(make_plan(graph, cut(graph, 2), (2, 1)), folder / "plan.json")
    (folder / "graph.txt").write_text(format_graph(graph))
    (folder / "run.yaml").write_text(
        'format: pipedream-run/1\nmodel: {source: "small_models:Noisy"}\n'
        'data: {source: "small_models:classes"}\nbatch_size: 4\nepochs: 2\nevaluate_every: 1\n'
    )
    words = ["pd-train", "plan.json", "--config", "run.yaml", "-o", "run"]
    done = typed(folder, words, {"PYTHONPATH": str(SUPPORT)}, seconds=100)
    assert done.code == 0, done.error
    assert "metrics.jsonl, report.html, timeline.png," in done.out
    assert "left out" not in done.error
    return folder / "run/report.html"


@pytest.mark.slow
def test_a_run_writes_its_page(real: Path) -> None:
    page = real.read_text()
    assert headings(page) == ["Loss", "Plan", "Ranks"]  # nothing was profiled
    read = Reader(page)
    summary = json.loads((real.parent / "summary.json").read_text())
    assert f"{summary['final_loss']:.4f}" in read.texts
    assert len(read.all("circle")) == 2
    assert len(read.all("img")) == 1
    assert not [text for text in read.texts if "Input" in text]  # computes nothing
    assert sum("On the held-out data" in text for text in read.texts) == 1
    assert len(page) < 1e6


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_browser_it_fits_the_window(width: int, tmp_path: Path) -> None:
    """In a frame of that width: chromium's own window is at least 500 wide."""
    written(finished(tmp_path, module="m" * 70, model="nets:" + "x" * 70))
    (tmp_path / "frame.html").write_text(FRAME.replace("WIDTH", str(width)))
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--dump-dom", "--hide-scrollbars"]
    command += ["--allow-file-access-from-files", f"--user-data-dir={tmp_path}/chromium"]
    command += ["--virtual-time-budget=5000", f"file://{tmp_path}/frame.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    found = re.search(r"<p id=\"said\">(\d+) (\d+) (\d+)</p>", done.stdout)
    assert found is not None, done.stdout
    assert found.groups() == (str(width), str(width), "2")
