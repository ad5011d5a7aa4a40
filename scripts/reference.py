"""Writes the generated parts of the site, as a mkdocs hook (`mkdocs.yml` names it).

Pages in docs/ hold lines such as

    <!-- command: pd-train -->
    <!-- schema: pipedream.graph.plan -->
    <!-- modules: pipedream.schedule -->

which become the options of a command, the fields of a file that a module describes by pydantic
models, and the API of every module below a package. Links to source files become links to that API.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import types
import typing
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Union, get_args, get_origin

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

ROOT = Path(__file__).parents[1]

COMMANDS = {
    "pd-profile": "pipedream.profiler.cli",
    "pd-optimize": "pipedream.optimizer.cli.command",
    "pd-train": "pipedream.runtime.cli",
}
FLOORS = ("graph", "sharding", "capture", "schedule", "comm", "profiler", "optimizer", "runtime")

_MARK = re.compile(r"^<!-- (command|schema|modules): (\S+) -->$", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\((?:\.\./)+([\w./-]+)(?:#[\w-]+)?\)")
_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def on_page_markdown(markdown: str, **_: object) -> str:
    """The hook: called by mkdocs with the text of each page."""
    return linked(expanded(markdown))


def expanded(markdown: str) -> str:
    """The text with every mark replaced. Raises if a mark names what does not exist."""
    writers = {"command": command_text, "schema": schema_text, "modules": modules_text}
    return _MARK.sub(lambda mark: writers[mark[1]](mark[2]), markdown)


def linked(markdown: str) -> str:
    """Turns links from a page to files outside docs/ into what the site has of them.

    A link whose text is a symbol of the file, or the file itself, goes to the API reference, where
    its source is shown; a link to a file that is not part of a package becomes plain text.
    """

    def replace(link: re.Match[str]) -> str:
        text, path = link[1], PurePosixPath(link[2])
        if not (ROOT / path).exists():
            return link[0]
        if path.parts[0] not in FLOORS or path.suffix != ".py":
            return text
        module = ".".join(("pipedream", *path.with_suffix("").parts)).removesuffix(".__init__")
        symbol = text.strip("`")
        return f"[{text}][{module if symbol.endswith('.py') else f'{module}.{symbol}'}]"

    return _LINK.sub(replace, markdown)


# Commands


class _Recorder(click.HelpFormatter):
    """Takes down what a command says of its options, under whichever headings it uses."""

    def __init__(self) -> None:
        super().__init__(width=10_000)
        self.tables: dict[str, list[tuple[str, str]]] = {}
        self.heading = ""

        self.written: list[str] = []

    def write(self, string: str) -> None:
        """What is written as it is: the examples."""
        self.written.append(string)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        self.heading = name
        yield

    def write_dl(self, rows: Any, col_max: int = 30, col_spacing: int = 2) -> None:
        self.tables.setdefault(self.heading, []).extend(rows)


def command_text(name: str) -> str:
    """Usage, description and a table of options under each heading of `NAME --help`."""
    command: click.Command = import_module(COMMANDS[name]).main
    context = click.Context(command, info_name=name)
    recorder = _Recorder()
    command.format_options(context, recorder)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    parts = [f"```text\n{usage}\n```", _help_text(command.help or "")]
    if recorder.written:
        parts.append("## Examples\n\n```sh\n" + "".join(recorder.written).rstrip() + "\n```")
    for heading, rows in recorder.tables.items():
        parts.append(f"## {heading}\n\n" + _table(("option", "is"), map(_option_row, rows)))
    return "\n\n".join(parts)


def _help_text(text: str) -> str:
    """Paragraphs that click leaves as they are (after a backspace) are code."""
    parts = inspect.cleandoc(text).split("\n\n")
    for index, part in enumerate(parts):
        if part.startswith("\b"):
            parts[index] = f"```sh\n{inspect.cleandoc(part.removeprefix(chr(8)))}\n```"
    return "\n\n".join(parts)


def _option_row(row: tuple[str, str]) -> tuple[str, str]:
    cores = f"<={os.cpu_count()}]"
    return f"`{row[0]}`", _cell(row[1].replace(cores, "<=cores]"))


# Schemas


def schema_text(module: str) -> str:
    """A table of fields for the file that the module describes: for the model that has a `format`,
    and for each model that its fields hold, in their order.
    """
    (root,) = (
        value
        for value in vars(import_module(module)).values()
        if inspect.isclass(value)
        and value.__module__ == module
        and issubclass(value, BaseModel)
        and "format" in value.model_fields
        and not value.__subclasses__()  # a draft is in no file
    )
    return "\n\n".join(map(_model_text, _models(root)))


def _models(root: type[BaseModel]) -> list[type[BaseModel]]:
    found: list[type[BaseModel]] = []

    def visit(annotation: Any) -> None:
        is_model = inspect.isclass(annotation) and issubclass(annotation, BaseModel)
        if is_model and annotation not in found:
            found.append(annotation)
            for info in annotation.model_fields.values():
                visit(info.annotation)
        for part in get_args(annotation):
            visit(part)

    visit(root)
    return found


def _model_text(model: type[BaseModel]) -> str:
    described = _field_docstrings(model)
    rows: list[tuple[str, ...]] = []
    for name, info in model.model_fields.items():
        doc = _cell(described.get(name, ""))
        rows.append((f"`{info.alias or name}`", _type_text(info), _default_text(info), doc))
    headings: tuple[str, ...] = ("field", "type", "default", "is")
    if not any(row[-1] for row in rows):
        headings, rows = headings[:-1], [row[:-1] for row in rows]
    doc = _prose(inspect.cleandoc(model.__doc__ or ""))
    return f"## {_title(model)}\n\n{doc}\n\n{_table(headings, rows)}"


def _title(model: type[BaseModel]) -> str:
    return model.__name__.strip("_")


def _field_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The string below each field, in the class and in those it inherits fields from."""
    described: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if not issubclass(cls, BaseModel) or cls is BaseModel:
            continue
        body = ast.parse(inspect.getsource(cls)).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, below in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
                and isinstance(below.value.value, str)
            ):
                described[field.target.id] = inspect.cleandoc(below.value.value)
    return described


def _type_text(info: FieldInfo) -> str:
    return _bounded(info.annotation, info.metadata)


def _bounded(annotation: Any, metadata: Iterable[Any]) -> str:
    """A type with the bounds that the metadata set: `number ≥ 0`."""
    items = [part for item in metadata for part in getattr(item, "metadata", [item])]
    bounds = [
        f"{sign} {getattr(item, key)}"
        for item in items
        for key, sign in _SIGNS.items()
        if getattr(item, key, None) is not None
    ]
    return f"{_annotation_text(annotation)} {', '.join(bounds)}".strip()


def _annotation_text(annotation: Any) -> str:
    """A type as a reader of JSON or YAML names it; links to the models of the same page."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is typing.Annotated:
        return _bounded(parts[0], parts[1:])
    if origin is Literal:
        return " or ".join(f"`{part}`" for part in parts)
    if origin in (Union, types.UnionType):
        return " or ".join(_annotation_text(part) for part in parts if part is not type(None))
    if origin in (tuple, list):
        inner = [_annotation_text(part) for part in parts if part is not Ellipsis]
        return f"list of {inner[0]}" if len(inner) == 1 else f"[{', '.join(inner)}]"
    if origin is dict:
        return f"mapping of text to {_annotation_text(parts[1])}"
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        title = _title(annotation)
        return f"[{title}](#{title.lower()})"
    named = {int: "whole number", float: "number", str: "text", bool: "true or false", Any: "any"}
    return named.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _default_text(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    default = info.get_default(call_default_factory=True)
    if default is None or default in ((), {}):
        return "none"
    if isinstance(default, BaseModel):
        return "its defaults"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{default}`"


# Modules


def modules_text(package: str) -> str:
    """A mkdocstrings block for every public module of the package and its subpackages."""
    folder = ROOT.joinpath(*package.split(".")[1:])
    blocks = []
    for path in [
        folder / "__init__.py",
        *sorted(set(folder.rglob("*.py")) - {folder / "__init__.py"}),
    ]:
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = ".".join(("pipedream", *parts)).removesuffix(".__init__")
        blocks.append(f"::: {module}")
    return "\n\n".join(blocks)


# Text


def _table(headings: tuple[str, ...], rows: Any) -> str:
    lines = [headings, ("---",) * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    """Text for a cell of a table, on one line."""
    return _prose(" ".join(text.split()))


def _prose(text: str) -> str:
    """Escapes what Markdown would take for markup, outside of code."""
    pieces = text.split("`")
    pieces[::2] = [
        re.sub(r"([\[*_])", r"\\\1", piece).replace("<", "&lt;").replace("|", "&#124;")
        for piece in pieces[::2]
    ]
    return "`".join(pieces)
