"""The click commands of the three tools: options under headings, one-line errors, files that are
written whole or not at all.
"""

from __future__ import annotations

import errno
import math
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import click

COUNT = click.IntRange(min=1)
PATH = click.Path(path_type=Path)

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Failed writes with these codes carry no file name."""


_LONGEST = 900
"""Characters of a message."""


_OWN = {".csv", ".html", ".json", ".jsonl", ".png", ".py", ".safetensors", ".svg", ".txt"}
"""Suffixes of files that the commands write."""


class UserError(click.ClickException):
    """A mistake that the user can fix: printed as one line without traceback, exit code 2.

    The message names the file and line, or the option; what is wrong; and what to do. What it
    cites is cut if it is long, and escaped if it cannot be printed or would move the cursor.
    """

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(_printable(message))


def _printable(message: str) -> str:
    text = "".join(
        character
        if character.isprintable() or character == "\n"
        else character.encode("unicode_escape").decode()
        for character in message
    )
    text = re.sub(r"\S{300,}", lambda word: f"{word[0][:100]}...{word[0][-20:]}", text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 200]} ... {text[-180:]}"


@contextmanager
def writing(output: Path) -> Iterator[None]:
    """Turns an OSError inside into the UserError `-o OUTPUT: cannot be written: why`."""
    try:
        yield
    except OSError as error:
        why = error.strerror or error  # pandas gives an error without a code for a missing folder
        raise UserError(f"-o {output}: cannot be written: {why}") from error


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yields a path beside, with the same suffix, to write to; it takes the place of `path` once
    the block is over, and goes if the block raises. So whoever reads `path` sees the old content or
    the new.
    """
    fresh = path.with_name(f".{path.stem}.partial{path.suffix}")
    try:
        yield fresh
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def remove_unfinished(folder: Path) -> None:
    """Deletes what processes that were killed inside of `whole` left beside files in `folder`."""
    for path in folder.glob(".*.partial.*"):
        if path.suffix in _OWN:
            path.unlink()


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes the bytes, or the text in UTF-8. Raises OSError."""
    with whole(path) as fresh:
        fresh.write_bytes(content.encode() if isinstance(content, str) else content)


def write_files(folder: Path, files: Mapping[str, bytes | None]) -> None:
    """Writes files by name; one whose content is None goes, as that of an earlier time. Raises
    UserError if the folder cannot be written.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            if content is None:
                (folder / name).unlink(missing_ok=True)
            else:
                write_whole(folder / name, content)


class FiniteRange(click.FloatRange):
    """A range of floating-point numbers without nan and inf."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


def option(
    declaration: str, text: str, kind: click.ParamType[Any] | None = None, **settings: Any
) -> click.Option:
    """Makes an option for `Command`: `option("-n --count N", "How often.", click.IntRange(min=1))`.

    `declaration`: the names of the option, its METAVAR in upper case, and the name of the Python
    parameter if that differs: "--arg NAME=VALUE arguments". Without METAVAR and `kind` it is a
    flag. `text`: what --help says; a `default` among the other settings of click.Option is added.
    """
    words = declaration.split()
    names = [word for word in words if word.startswith("-") or word.islower()]
    metavar = " ".join(word for word in words if word not in names) or None
    if not metavar and kind is None:
        settings["is_flag"] = True
    settings.setdefault("show_default", "default" in settings)
    return click.Option(names, help=text, type=kind, metavar=metavar, **settings)


class Command(click.Command):
    """A click command that reports every error in one line: `pd-optimize: what is wrong`.

    `groups`: its options under the headings of --help. Those that decorators declare, and --help
    itself, come last, under Options.
    `examples`: command lines that --help shows before the options, as they are typed.
    """

    def __init__(
        self,
        *args: Any,
        groups: Mapping[str, Sequence[click.Option]] | None = None,
        examples: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.groups, self.examples = groups or {}, examples
        self.params += [each for options in self.groups.values() for each in options]
        self.params.append(_version())

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.examples:
            with formatter.section("Examples"):
                for line in "\n".join(self.examples).splitlines():
                    formatter.write(f"{'':{formatter.current_indent}}{line}\n")
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        grouped = {each for group in self.groups.values() for each in group}
        others = [each for each in options if each not in grouped]
        for heading, group in {**self.groups, "Options": others}.items():
            with formatter.section(heading):
                records = (each.get_help_record(ctx) for each in group)
                formatter.write_dl([record for record in records if record is not None])

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        kwargs["standalone_mode"] = False
        try:
            code = super().main(*args, **kwargs)
        except click.exceptions.Abort:
            _fail(self.name, "interrupted", 130)
        except click.exceptions.Exit as stop:
            sys.exit(stop.exit_code)
        except (click.ClickException, OSError) as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE and not error.filename:
                # Who reads the output has had enough.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                sys.exit(128 + signal.SIGPIPE)
            line = in_one_line(error)
            if line is None:
                raise
            _fail(self.name, line, 2)
        sys.exit(code if isinstance(code, int) else 0)


def _version() -> click.Option:
    def show(context: click.Context, _option: click.Parameter, asked: bool) -> None:
        if asked:
            python = ".".join(map(str, sys.version_info[:3]))
            version, torch = (metadata.version(name) for name in ("pipedream", "torch"))
            click.echo(f"{context.info_name} {version} (Python {python}, torch {torch})")
            context.exit()

    text, quietly = "Show the version and exit.", {"expose_value": False, "is_eager": True}
    return click.Option(["--version"], is_flag=True, help=text, callback=show, **quietly)


def in_one_line(error: Exception) -> str | None:
    """Returns the line that tells the user of the error; None if the user cannot mend it."""
    if isinstance(error, click.ClickException):
        message = error.format_message()
    elif not isinstance(error, OSError):
        return None
    elif error.filename is not None:
        message = f"{error.filename}: {error.strerror}"
    elif error.errno in _DISK_FULL:
        message = f"{error.strerror}: free some disk space"
    else:
        return None
    return " ".join(message.split())


def _fail(program: str | None, message: str, code: int) -> NoReturn:
    print(f"{program}: {message}", file=sys.stderr)
    sys.exit(code)
