"""JSON and YAML files that a person wrote, wrong in every way that people find."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict, field_validator

from pipedream.graph.errors import UserError, read_artifact


class Thing(BaseModel):
    rate: float
    note: str | float = ""


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.json", b'{"rate": 1,}', r"a\.json:1: not JSON: "),
        ("a.json", b'{\n"rate":\n}', r"a\.json:3: not JSON: "),
        ("a.json", b"", r"a\.json:1: not JSON: "),
        ("a.json", b"[" * 100_000, r"a\.json:1: nested too deeply"),
        ("a.json", b'{"rate": ' + b"1" * 5000 + b"}", r"a\.json:1: not JSON: "),
        ("a.json", b"[1]", r"a\.json:1: expected named fields, found a list"),
        ("a.json", b"null", r"a\.json:1: expected named fields, found nothing"),
        (
            "a.json",
            b'{"note": 1,\n"rate":\n"x"}',
            r"a\.json:3: rate: 'x' is not a number",
        ),
        ("a.json", b'"\xff"', "not a text file"),
        ("a.yaml", b"rate: 1\n  more: 2\n", r"a\.yaml:2: mapping values are not allowed"),
        ("a.yaml", b"rate: [1\n", r"a\.yaml:2: "),
        ("a.yaml", b"\trate: 1\n", r"a\.yaml:1: "),
        ("a.yaml", b"rate: 2020-99-99\n", r"a\.yaml:1: rate: '2020-99-99' is not a number"),
        ("a.yaml", b"rate: " + b"9" * 5000, r"a\.yaml:1: not YAML"),
        ("a.yaml", b"{[1, 2]: 3}\n", r"a\.yaml:1: found unhashable key"),
        ("a.yaml", b"rate: \x00\n", r"a\.yaml:1: not YAML"),
        ("a.yaml", b"", r"a\.yaml:1: expected named fields, found nothing"),
        ("a.yaml", b"hello\n", r"a\.yaml:1: expected named fields, found a str"),
        ("a.yaml", b"[" * 50_000, r"a\.yaml:1: "),
        ("a.yaml", b"rate: fast\n", r"a\.yaml:1: rate: 'fast' is not a number"),
        ("a.yaml", b"rate: 1\nnote: a\nrate: 2\n", r"a\.yaml:3: rate is given twice"),
        ("a.yaml", b"note: fast\n", r"a\.yaml:1: rate: is missing"),
        ("a.yaml", b"rate: !!python/object/apply:os.getcwd []\n", r"a\.yaml:1: could not determ"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(
    tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=says):
        read_artifact(path, Thing)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"b\.yaml: cannot be read: No such file"):
        read_artifact(tmp_path / "b.yaml", Thing)


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "+1e-3", "1.0e-3", "0.001", "1.e-03"])
def test_a_rate_in_yaml_is_a_number_as_people_write_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"rate: {text}\nnote: {text}\n")
    assert read_artifact(path, Thing) == Thing(rate=1e-3, note=1e-3)


@pytest.mark.parametrize("text", ["1e-3x", "e5", "'1e-3'", "v1e-3"])
def test_a_note_that_only_resembles_a_number_stays_a_note(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"rate: 1\nnote: {text}\n")
    assert read_artifact(path, Thing).note == text.strip("'")


class Speed(BaseModel):
    model_config = ConfigDict(extra="forbid")

    speed: str

    @field_validator("speed")
    @classmethod
    def _check(cls, speed: str) -> str:
        raise ValueError(f"there is no {speed}")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('speed: "\\ud800"', r":1: '\ud800' is not a character"),
        ('"spe\\ned": 1', r":1: spe\ned: unknown field"),
    ],
)
def test_text_that_cannot_be_printed_is_told_in_a_line(
    text: str, problem: str, tmp_path: Path
) -> None:
    """Half of a surrogate pair was a traceback, and a line break in a name made two lines."""
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(UserError) as refused:
        read_artifact(tmp_path / "a.yaml", Speed)
    message = refused.value.format_message()
    assert problem in message
    assert "\n" not in message
