"""`pd-optimize`: decides which part of a model runs where."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from pipedream.graph.command import PATH, Command, write_files
from pipedream.optimizer.cli.arguments import EXAMPLES, GROUPS
from pipedream.optimizer.cli.values import make_options

if TYPE_CHECKING:
    from pathlib import Path

    from pipedream.optimizer.cli.options import Options


@click.command("pd-optimize", cls=Command, groups=GROUPS, examples=EXAMPLES)
@click.argument("graph", type=PATH)
@click.pass_context
def main(context: click.Context, /, **_values: Any) -> None:
    """Plan the model of GRAPH, a graph.txt of pd-profile, for a cluster.

    Writes plan.json for pd-train, graph.txt with the stage of each node, and a picture of it.

    GRAPH may be the folder that has it, or one made by pd-profile --batch-sizes; then each batch
    size is planned, and the fastest is chosen.
    """
    # Threads of numpy's BLAS do not help; it reads this when it is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from pipedream.graph.shown.tables import make_console
    from pipedream.optimizer.cli.answer.plan import plan
    from pipedream.optimizer.cli.output import sections
    from pipedream.optimizer.cli.planning import quick_collector

    options = typed_options(context)
    assert options.output is not None
    with quick_collector():
        console = make_console()
        for section in sections(plan(options)):
            # First of all: `pd-optimize ... | head` ends with the first line that is too many.
            if section.files:
                write_files(options.output, section.files)
            section.show(console)
            if section.named is not None:
                click.echo(section.named(options.output))


def typed_options(context: click.Context) -> Options:
    """The options on the command line; the output folder is by default beside GRAPH."""
    graph: Path = context.params["graph"]
    given = {
        name: value
        for name, value in context.params.items()
        if name != "graph"
        and context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    }
    options = make_options(graph, given)
    beside = (graph if graph.is_dir() else graph.parent) / "plan"
    return replace(options, output=options.output or beside)


if __name__ == "__main__":
    main()
