"""The commands that README and the tutorial show do what they say.

Fenced blocks with a title are files, which the reader is told to write; blocks in `sh` are run in
their order, in one folder. A comment `<!-- not run: REASON -->` above a block leaves it out.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from commands import typed

from pipedream.graph.run_config import read_config

ROOT = Path(__file__).parents[2]

NOT_RUN = {
    "README.md": [
        "scripts/demo.sh",
        "pip install -e '.[models]' --config-settings editable_mode=strict",
    ],
    "docs/tutorial.md": [],
}
"""What is shown and not run: it installs packages."""

QUICK = ["--warmup", "1", "--repeats", "4"]
"""Added to what pd-profile measures with, so that the test takes seconds."""


class Block(NamedTuple):
    language: str
    title: str | None
    skipped: bool
    text: str


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, in their order."""
    fence = r'^(<!-- not run: [^>]+ -->\n)?```(\w+)(?: title="([^"]+)")?\n(.*?)\n```$'
    found = re.finditer(fence, (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    return [Block(match[2], match[3], match[1] is not None, match[4]) for match in found]


def commands(page: str, skipped: bool = False) -> list[str]:
    """One entry for each command of the `sh` blocks; lines that end in a backslash are joined."""
    shown = [
        block.text for block in blocks(page) if block.language == "sh" and block.skipped is skipped
    ]
    return "\n".join(shown).replace("\\\n", " ").splitlines()


@pytest.mark.parametrize("page", NOT_RUN)
def test_what_is_not_run_is_known(page: str) -> None:
    assert commands(page, skipped=True) == NOT_RUN[page]


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("page", NOT_RUN)
def test_the_commands_of_a_page_run(page: str, tmp_path: Path) -> None:
    for block in blocks(page):
        if block.title is not None:
            (tmp_path / block.title).write_text(block.text + "\n")
    for command in commands(page):
        words = shlex.split(command)
        if words[0] == "pd-profile" and "--show" not in words:
            words += QUICK
        out = run(tmp_path, words)
        for name in written(out):
            assert (tmp_path / name).exists(), (command, name)
    summary = json.loads((tmp_path / "runs/run/summary.json").read_text())
    assert summary["held_out_accuracy"] > 0.7


def run(folder: Path, words: list[str]) -> str:
    """What the command prints; it must succeed."""
    if words[0] != "python":
        done = typed(folder, words, {"OMP_NUM_THREADS": "1"}, seconds=120)
        assert done.code == 0, f"{shlex.join(words)}\n{done.out}{done.error}"
        return done.out
    program = [sys.executable, *words[1:]]
    return subprocess.run(program, cwd=folder, capture_output=True, text=True, check=True).stdout


def written(out: str) -> list[str]:
    """The first file of each line `Written: FILE, FILE`; the others stand beside it."""
    return re.findall(r"^Written: ([\w./-]+)", out, re.MULTILINE)


def test_the_tutorial_uses_the_files_of_the_readme() -> None:
    files = [{b.title: b.text for b in blocks(page) if b.title} for page in NOT_RUN]
    assert files[0].items() <= files[1].items()


def test_the_run_config_with_all_fields_has_them_and_is_one(tmp_path: Path) -> None:
    """The reference named no field at all but in the built site."""
    (shown,) = [b for b in blocks("docs/reference/run-config.md") if b.title == "all.yaml"]
    (tmp_path / "all.yaml").write_text(shown.text)
    config = read_config(tmp_path / "all.yaml")
    parts = (config, config.data, config.optimizer, config.scheduler, config.asynchronous)
    for part in (*parts, *config.optimizer.groups):
        assert part is not None
        assert part.model_fields_set == set(type(part).model_fields)
