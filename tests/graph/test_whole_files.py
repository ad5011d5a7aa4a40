"""Files are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipedream.graph.command import whole, write_whole


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
