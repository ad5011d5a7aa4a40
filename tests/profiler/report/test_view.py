from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
from profiled import layer, profile

from pipedream.graph.profile import write_profile
from pipedream.profiler.cli import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """pd-profile beside two profiles, `a` and `b`: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    for name, forward in (("a", 1.0), ("b", 5.0)):
        (tmp_path / name).mkdir()
        write_profile(
            profile(layer("one", forward=forward), layer("two", forward=2)),
            tmp_path / name / "profile.json",
        )
    (tmp_path / "a/graph.txt").write_text("node_one -- Linear()")

    def call(*args: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main.main(list(args), prog_name="pd-profile")
        printed = capsys.readouterr()
        assert isinstance(stop.value.code, int)
        return stop.value.code, printed.out, printed.err

    return call


@pytest.mark.parametrize("named", ["b", "b/profile.json"])
def test_show_prints_the_table_and_writes_nothing(run: Run, tmp_path: Path, named: str) -> None:
    code, out, err = run("--show", named, "--sort", "forward", "--top", "1")
    assert (code, err) == (0, "")
    assert "one: Linear" in out
    assert "two: Linear" not in out
    assert "All nodes: forward 7 ms" in out
    assert {path.name for path in (tmp_path / "b").iterdir()} == {"profile.json"}


def test_diff_prints_and_writes_what_differs(run: Run, tmp_path: Path) -> None:
    code, out, err = run("--diff", "a", "b/profile.json", "-o", "diff.csv")
    assert (code, err) == (0, "")
    assert "1 of 2 nodes changed" in out
    assert "Written: diff.csv" in out
    with (tmp_path / "diff.csv").open(newline="") as file:
        one, two = csv.DictReader(file)
    assert (one["module"], one["op"], one["occurrence"]) == ("one", "Linear", "1")
    assert float(one["forward_seconds_a"]) == 0.001
    assert float(one["forward_seconds_b"]) == 0.005
    assert float(one["forward_seconds_change"]) == pytest.approx(0.004)
    assert (one["forward_seconds_differs"], two["forward_seconds_differs"]) == ("True", "False")
    run("--diff", "a", "b")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "diff.csv"}


WRONG = {
    "a model to show": (["--show", "a", "x:y"], "--show measures nothing: leave MODEL out"),
    "a folder to show into": (["--show", "a", "-o", "c"], "leave -o out"),
    "show and diff": (["--show", "a", "--diff", "a", "b"], "leave --diff out"),
    "an option of measuring": (["--diff", "a", "b", "--batch-size", "4"], "leave --batch-size out"),
    "one to compare": (["--diff", "a"], "'--diff' requires 2 arguments"),
    "no such folder": (["--show", "c"], "c: cannot be read: No such file or directory"),
    "not a profile": (["--show", "a/graph.txt"], "a/graph.txt: name a folder"),
    "a folder without one": (["--diff", "a", "."], "profile.json: cannot be read"),
    "a diff into a folder": (["--diff", "a", "b", "-o", "a"], "-o a: with --diff this is a file"),
    "a diff into nowhere": (["--diff", "a", "b", "-o", "c/d.csv"], "-o c/d.csv: cannot be written"),
    "no such order": (["--show", "a", "--sort", "weight"], "'--sort': 'weight' is not one of"),
    "fewer than no rows": (["--show", "a", "--top", "-1"], "--top"),
    "nothing to do": (["--sort", "time"], "MODEL is missing"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_every_mistake_is_one_line_and_exit_code_2(run: Run, wrong: str) -> None:
    args, told = WRONG[wrong]
    code, _, err = run(*args)
    assert code == 2
    assert err.startswith("pd-profile: ")
    assert told in err
    assert err.count("\n") == 1
