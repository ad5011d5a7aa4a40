"""Every error that a user can mend is one line on stderr and exit code 2."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import click
import pytest

from pipedream.graph.command import Command, UserError, option, whole, write_whole


@click.command("pd-try", cls=Command)
@click.argument("action")
@click.option("--count", type=int, default=1)
def tool(action: str, count: int) -> int | None:
    """Does what it is told."""
    if action == "mistake":
        raise UserError("graph.txt:3: node a is there twice\n  and more")
    if action == "write":
        Path("/nowhere/at/all").write_text("")
    if action == "full":
        Path("/dev/full").write_text("more")
    if action == "interrupt":
        raise KeyboardInterrupt
    if action == "bug":
        raise AssertionError("not the user's fault")
    return count if action == "code" else None


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[object, str]:
    with pytest.raises(SystemExit) as stopped:
        tool.main(list(args))
    return stopped.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["mistake"], 2, "pd-try: graph.txt:3: node a is there twice and more\n"),
        (["write"], 2, "pd-try: /nowhere/at/all: No such file or directory\n"),
        (["full"], 2, "pd-try: No space left on device: free some disk space\n"),
        (["interrupt"], 130, "pd-try: interrupted\n"),
        ([], 2, "pd-try: Missing argument 'ACTION'.\n"),
        (["x", "--count", "y"], 2, "pd-try: Invalid value for '--count': "),
        (["x", "--cuont", "1"], 2, "pd-try: No such option '--cuont'"),
        (["x"], 0, ""),
        (["code", "--count", "3"], 3, ""),
    ],
)
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], args: list[str], code: int, says: str
) -> None:
    found, err = run(capsys, *args)
    assert found == code
    assert says in err
    assert len(err.strip().splitlines()) == bool(says)


def test_help_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        tool.main(["--help"])
    assert stopped.value.code == 0
    assert "Does what it is told." in capsys.readouterr().out


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(AssertionError):
        tool.main(["bug"])


def test_help_lists_examples_before_the_options_and_each_option_under_its_heading(
    capsys: pytest.CaptureFixture[str],
) -> None:
    @click.command(
        "pd-try",
        cls=Command,
        groups={"Output": [option("-o --out FILE out", "Where to.", default="here")]},
        examples=["pd-try here", "pd-try there \\\n  --out FILE"],
    )
    @click.option("--count", help="How often.")
    def grouped(count: str, out: str) -> None:
        """Does what it is told."""

    with pytest.raises(SystemExit):
        grouped.main(["--help"])
    _, _, text = capsys.readouterr().out.partition("told.\n")
    lines = [line for line in text.splitlines() if line]
    assert lines == [
        "Examples:",
        "  pd-try here",
        "  pd-try there \\",
        "    --out FILE",
        "Output:",
        "  -o, --out FILE  Where to.  [default: here]",
        "Options:",
        "  --count TEXT  How often.",
        "  --version     Show the version and exit.",
        "  --help        Show this message and exit.",
    ]


@pytest.mark.parametrize(
    ("declared", "args", "values"),
    [
        (option("-n --count N", "", click.IntRange(min=1)), ["-n", "3"], {"count": 3}),
        (option("--arg NAME=VALUE arguments", ""), ["--arg", "a=1"], {"arguments": "a=1"}),
        (option("--diff A B", "", nargs=2), ["--diff", "x", "y"], {"diff": ("x", "y")}),
        (option("--largest BYTES", ""), ["--largest", "-1"], {"largest": "-1"}),
        (option("--all", ""), ["--all"], {"all": True}),
        (option("--all", ""), [], {"all": False}),
        (option("--color/--no-color", "", default=True), ["--no-color"], {"color": False}),
        (option("--kind", "", click.Choice(["a", "b"])), ["--kind", "b"], {"kind": "b"}),
    ],
)
def test_an_option_is_declared_by_its_names_and_metavar(
    declared: click.Option, args: list[str], values: dict[str, object]
) -> None:
    assert Command("pd-try", groups={"Output": [declared]}).make_context("", args).params == values


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        Command("pd-try").main(["--version"], prog_name="pd-try")
    assert end.value.code == 0
    assert re.fullmatch(
        rf"pd-try {re.escape(version('pipedream'))} \(Python 3\.\d+\.\d+, torch \d\S+\)\n",
        capsys.readouterr().out,
    )


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("graph.txt:1: \x1b[2J is no node", r"graph.txt:1: \x1b[2J is no node"),
        ("a \ud800 b\u2028c", r"a \ud800 b\u2028c"),
        ("node " + "9" * 1000, "node " + "9" * 100 + "..." + "9" * 20),
        ("Größe, 量", "Größe, 量"),
    ],
)
def test_what_a_message_cites_is_cut_and_escaped(said: str, shown: str) -> None:
    """A line of a file of any length, and what moves the cursor, went to the terminal as it was."""
    assert UserError(said).format_message() == shown


def test_a_long_message_keeps_its_begin_and_end() -> None:
    message = UserError("first " + "word " * 1000 + "last").format_message()
    assert len(message) < 950
    assert message.startswith("first")
    assert message.endswith("last")


def test_a_file_that_is_not_finished_leaves_the_old_one(tmp_path: Path) -> None:
    """A run killed while it wrote summary.json left half of it."""
    path = tmp_path / "summary.json"
    write_whole(path, "old")
    with pytest.raises(RuntimeError):
        _half(path)
    assert [each.name for each in tmp_path.iterdir()] == ["summary.json"]
    assert path.read_text() == "old"
    write_whole(path, "größer")
    assert path.read_text(encoding="utf-8") == "größer"
    assert [each.name for each in tmp_path.iterdir()] == ["summary.json"]


def _half(path: Path) -> None:
    with whole(path) as fresh:
        fresh.write_text("ne")
        assert path.read_text() == "old"
        raise RuntimeError("the disk is full")


def test_what_is_written_beside_has_the_same_suffix(tmp_path: Path) -> None:
    with whole(tmp_path / "timeline.png") as fresh:
        assert fresh.suffix == ".png"
        fresh.touch()
    assert (tmp_path / "timeline.png").exists()
