"""The click command class of the three tools: one-line errors, and --help under headings."""

from __future__ import annotations

import errno
import math
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import click

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Failed writes with these codes carry no file name."""


class FiniteRange(click.FloatRange):
    """A range of floating-point numbers without nan and inf."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


class Command(click.Command):
    """A click command that reports every error in one line: `pd-optimize: what is wrong`.

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
            if error.errno not in _DISK_FULL:
                raise
            _fail(self.name, f"{error.strerror}: free some disk space", 2)
        sys.exit(code if isinstance(code, int) else 0)


class Calculation(Command):
    """A command without side effects, which Ctrl-C ends at once.

    KeyboardInterrupt is not enough: raised between compiled code and Python, it may be replaced by
    another exception or lost.
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
