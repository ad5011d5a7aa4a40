"""The pages of docs/: all are in the navigation, links lead somewhere, references generate."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from mkdocs.utils import yaml_load

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [*PAGES, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]

LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def test_every_page_is_in_the_navigation() -> None:
    nav = yaml_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert sorted(pages_of(nav)) == [str(path.relative_to(DOCS)) for path in PAGES]


def pages_of(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for part in entry.values() if isinstance(entry, dict) else entry:
            yield from pages_of(part)


@pytest.mark.slow
@pytest.mark.parametrize("path", TEXTS, ids=named)
def test_links_lead_to_files_and_symbols(path: Path) -> None:
    for text, target in LINK.findall(without_code(path.read_text())):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.exists(), target
        symbol = text.strip("`")
        if linked.suffix == ".py" and not symbol.endswith(".py"):
            assert symbol in symbols(linked), f"{symbol} is not defined in {target}"
        if anchor and linked.suffix == ".md":
            assert anchor in anchors(linked), target


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def symbols(path: Path) -> set[str]:
    """Public functions, classes and `Class.method`s of a file: what the API reference has."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            names.add(node.name)
            inner = node.body if isinstance(node, ast.ClassDef) else []
            names |= {
                f"{node.name}.{part.name}" for part in inner if isinstance(part, ast.FunctionDef)
            }
    return names


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", without_code(path.read_text()), re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "scripts/reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_has_what_a_package_itself_defines(reference: ModuleType) -> None:
    """Pages link to it, and the build of the site, a check of test.sh, found nothing there."""
    assert "pipedream.sharding.rules" in reference.modules_text("pipedream.sharding").split()
    assert "members: false" not in reference.modules_text("pipedream.sharding")


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_generated_parts_are_there(path: Path, reference: ModuleType) -> None:
    text = path.read_text()
    expanded = reference.expanded(text)
    marks = re.findall(r"^<!-- (?:command|schema|modules): .*-->$", text, re.MULTILINE)
    assert len(expanded) >= len(text) + 150 * len(marks)


def test_the_run_config_is_described_field_by_field(reference: ModuleType) -> None:
    text = reference.schema_text("pipedream.graph.run_config")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) > 35
    assert not [row for row in rows if row.endswith("|  |")]


def test_links_to_code_lead_to_the_api(reference: ModuleType) -> None:
    line = "[`Graph`](../graph/model.py), [`graph/model.py`](../graph/model.py), [t](tutorial.md)"
    assert reference.linked(line) == (
        "[`Graph`][pipedream.graph.model.Graph], [`graph/model.py`][pipedream.graph.model], "
        "[t](tutorial.md)"
    )
