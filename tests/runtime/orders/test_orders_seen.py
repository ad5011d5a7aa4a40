"""What pd-train tells of ranks that have several stages."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from commands import typed
from order_runs import MOMENTUM, on_ranks, prepare, train

from pipedream.schedule.action import parse_action
from pipedream.schedule.orders.literature import vee


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A V of four stages, of which the plan says that they need 1, 2, 3 and 4 MB."""
    prepare(tmp_path, "Tied", "zb-v", on_ranks(vee(2, 2)), optimizer=MOMENTUM, epochs=1)
    plan = json.loads((tmp_path / "plan.json").read_text())
    for stage in plan["stages"]:
        stage["memory_bytes"] = 1e6 * (stage["stage"] + 1)
    plan["stages"][2]["memory_bytes"] = 6e6
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    return tmp_path


DRY = ["pd-train", "plan.json", "--config", "run.yaml", "--dry-run"]


def test_a_dry_run_adds_up_the_stages_of_a_rank(folder: Path) -> None:
    done = typed(folder, DRY)
    assert (done.code, done.error) == (0, "")
    lines = {line.split()[0]: line for line in done.out.splitlines()}
    assert lines["plan"].endswith(
        "stages of 1, 1, 1, 1 workers; 2 in all, each in 2 stages; order zb-v"
    )
    told = (
        "1 MB, 2 MB, 6 MB, 4 MB of a worker, by stage; of a rank, for all its stages, at most 8 MB"
    )
    assert told in lines["memory"]
    assert "all of them 13 MB" in lines["memory"]


def test_a_dry_run_finds_tied_stages_that_cannot_learn_together(folder: Path) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    plan |= {"schedule": "weight-stashing", "order": "merged"}
    (folder / "plan.json").write_text(json.dumps(plan))
    done = typed(folder, DRY)
    assert done.code == 2
    (line,) = done.error.splitlines()
    assert "a.linear.weight is used in stages 0 and 3: with weight-stashing each stage" in line


@pytest.mark.slow
def test_the_record_of_a_run(folder: Path) -> None:
    """Halves in the timeline, and one row of memory for each rank in the page."""
    train(folder, "--trace")
    rows = [line.split(",") for line in (folder / "run/timeline.csv").read_text().splitlines()[1:]]
    actions = [(int(rank), parse_action(text)) for rank, text, *_ in rows]
    assert {action.stage for rank, action in actions if rank == 0} == {0, 3}
    assert {"BI", "BW"} <= {action.kind for _, action in actions}
    page = (folder / "run/report.html").read_text()
    table = page[page.index("Memory, and the most that was held at once") :]
    cells = [re.findall(r"<td[^>]*>\s*(.*?)\s*</td>", row) for row in table.split("<tr")]
    ranks = [(row[0], row[1], row[-1]) for row in cells if row][:2]
    assert ranks == [("0", "0,3", "4,1"), ("1", "1,2", "3,2")]
