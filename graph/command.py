"""How every tool of the house speaks to its user when something is wrong."""

from __future__ import annotations

import errno
import math
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import click

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""A write that fails names no file, and is nobody's mistake in the code."""


class FiniteRange(click.FloatRange):
    """A range of numbers that has neither nan nor inf in it."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number", param, ctx)
        return number


class Command(click.Command):
    """A click command whose every error is one line: `pd-optimize: what is wrong`.

    `groups`: options, by their Python names, that --help lists under headings of their own.
    `examples`: command lines that --help shows before the options, as they are typed.
    """

    def __init__(
        self,
        *args: Any,
        groups: Mapping[str, Sequence[str]] | None = None,
        examples: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.groups, self.examples = groups or {}, examples

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.examples:
            with formatter.section("Examples"):
                for line in "\n".join(self.examples).splitlines():
                    formatter.write(f"{'':{formatter.current_indent}}{line}\n")
        heading_of = {name: head for head, names in self.groups.items() for name in names}
        rows: dict[str, list[tuple[str, str]]] = {head: [] for head in (*self.groups, "Options")}
        for parameter in self.get_params(ctx):
            row = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if row is not None:
                rows[heading_of.get(parameter.name or "", "Options")].append(row)
        for heading, listed in rows.items():
            if listed:
                with formatter.section(heading):
                    formatter.write_dl(listed)

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        kwargs["standalone_mode"] = False
        try:
            code = super().main(*args, **kwargs)
        except click.exceptions.Abort:
            _fail(self.name, "interrupted", 130)
        except click.exceptions.Exit as stop:
            sys.exit(stop.exit_code)
        except click.ClickException as error:
            _fail(self.name, error.format_message(), 2)
        except OSError as error:
            if error.filename is not None:
                _fail(self.name, f"{error.filename}: {error.strerror}", 2)
            if error.errno not in _NO_ROOM:
                raise
            _fail(self.name, f"{error.strerror}: make room for what is written", 2)
        sys.exit(code if isinstance(code, int) else 0)


class Calculation(Command):
    """A command that leaves nothing behind: Ctrl-C ends it at once.

    An exception would not do: where it comes up between compiled code and Python, other exceptions
    take its place, or it is lost.
    """

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        before = signal.signal(signal.SIGINT, self._leave)
        try:
            super().main(*args, **kwargs)
        finally:
            signal.signal(signal.SIGINT, before)

    def _leave(self, *_: object) -> NoReturn:
        os.write(sys.stderr.fileno(), f"\n{self.name}: interrupted\n".encode())
        os._exit(130)


def _fail(program: str | None, message: str, code: int) -> NoReturn:
    print(f"{program}: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)
