"""`pd-profile --show` and `--diff`: shows and compares profiles that were measured before."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipedream.graph.command import PATH, UserError, option, write_whole, writing
from pipedream.profiler.report.layers import ORDERS

if TYPE_CHECKING:
    from pipedream.graph.profile import Profile

VIEW_OPTIONS = (
    option(
        "--show PROFILE",
        "Print the table of a profile, given its folder or its profile.json.",
        PATH,
    ),
    option(
        "--diff A B",
        "Print the differences between two profiles; -o FILE.csv also writes them.",
        PATH,
        nargs=2,
    ),
    option(
        "--sort QUANTITY",
        f"Sort the table by {', '.join(ORDERS[:-1])} or by order of execution (order).",
        click.Choice(ORDERS),
        default="time",
    ),
    option(
        "--top N",
        "Rows of the table; 0 for all.  [default: 10; all for --sort order]",
        click.IntRange(min=0),
    ),
)
_ALLOWED = {"show": ("show", "sort", "top"), "diff": ("diff", "sort", "top", "output")}


def view_profiles(context: click.Context) -> bool:
    """Does what --show or --diff asks for; returns False if neither is given. Raises UserError."""
    parameters = context.params
    views = [name for name in ("show", "diff") if parameters[name] is not None]
    if not views:
        return False
    _check_options(context, views[0])
    if parameters["show"] is not None:
        from pipedream.profiler.report.summary import print_report

        print_report(_read(parameters["show"]), parameters["sort"], parameters["top"])
    else:
        a, b = parameters["diff"]
        _diff(a, b, parameters["output"], parameters["sort"], parameters["top"])
    return True


def _check_options(context: click.Context, view: str) -> None:
    """Raises UserError for an option of the command line that does not go with `view`."""
    for parameter in context.command.params:
        name = parameter.name or ""
        typed = context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if typed and name not in _ALLOWED[view]:
            other = parameter.opts[0] if parameter.param_type_name == "option" else "MODEL"
            raise UserError(f"--{view} measures nothing: leave {other} out")


def _diff(a: Path, b: Path, output: Path | None, sort: str, top: int | None) -> None:
    from pipedream.profiler.report.diff import Diff, print_diff

    if output is not None and (output.is_dir() or output.suffix != ".csv"):
        raise UserError(f"-o {output}: with --diff this is a file: write {output / 'diff.csv'}")
    diff = Diff(_read(a), _read(b))
    print_diff(diff, sort, top)
    if output is not None:
        with writing(output):
            write_whole(output, diff.table().to_csv(index=False))
        click.echo(f"Written: {output}")


def _read(path: Path) -> Profile:
    from pipedream.graph.profile import read_profile

    if path.exists() and not path.is_dir() and path.suffix != ".json":
        raise UserError(f"{path}: name a folder that pd-profile wrote, or the profile.json in it")
    return read_profile(path / "profile.json" if path.is_dir() else path)
