"""The options of each plan, where GRAPH is a folder of profiles of several batch sizes."""

from __future__ import annotations

from dataclasses import replace

from pipedream.graph.errors import UserError
from pipedream.graph.profile import folder_of, sizes_in
from pipedream.optimizer.cli.options import Options


def options_by_size(options: Options) -> dict[int, Options | None]:
    """The options for each batch size in the folder GRAPH, smallest first; None for sizes that do
    not divide --global-batch.

    Raises UserError if options contradict each other, or there is no size to plan for.
    """
    folder, whole = options.graph_path, options.global_batch
    _check(options)
    by_size: dict[int, Options | None] = {}
    for size in sizes_in(folder):
        count = options.microbatches if whole is None else whole // size
        graph = folder_of(folder, size) / "graph.txt"
        changed = replace(options, graph=graph, profile=None, microbatches=count)
        by_size[size] = changed if whole is None or whole % size == 0 else None
    if not by_size:
        raise UserError(
            f"{folder}: no profiles of batch sizes here, as pd-profile --batch-sizes makes them:"
            " name such a folder, or a graph.txt"
        )
    if not any(by_size.values()):
        sizes = ", ".join(map(str, by_size))
        raise UserError(f"--global-batch {whole}: is not a multiple of any batch size ({sizes})")
    return by_size


def _check(options: Options) -> None:
    folder = options.graph_path
    if options.calibrate:
        raise UserError(
            f"--calibrate: a run has one batch size: name the graph.txt of that one in {folder}"
        )
    if "profile" in options.typed:
        raise UserError(f"--profile: in {folder} each batch size has its own: leave it out")
    if options.output is not None and options.output.resolve() == folder.resolve():
        raise UserError(f"-o {folder}: this is the profile folder: choose another")
    if options.global_batch is not None and "microbatches" in options.typed:
        raise UserError(
            "--global-batch and --microbatches both set the examples per update: give one of them"
        )
