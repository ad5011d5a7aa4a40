"""Options and tasks for each batch size in a folder of profiles, and for each of its sequence
lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pipedream.graph.errors import UserError
from pipedream.graph.profile import Profile, folder_of, sequence_folder, sequences_in, sizes_in
from pipedream.optimizer.cli.inputs import any_profile
from pipedream.optimizer.cli.options import ModelInMemory, Options
from pipedream.optimizer.cli.task import Task, make_task
from pipedream.optimizer.compare.batch_sizes import check_alike


def with_sequence(options: Options) -> Options:
    """Returns the options with the graph, or the folder, of --sequence. Raises UserError if there
    is none, or several and nobody says which.
    """
    length = options.sequence
    folder = options.graph if isinstance(options.graph, Path) and options.graph.is_dir() else None
    lengths = [] if folder is None else sequences_in(folder)
    if folder is not None and length in lengths:
        options = replace(options, graph=sequence_folder(folder, length))
    if isinstance(options.graph, Path) and (options.graph / "graph.txt").exists():
        options = replace(options, graph=options.graph / "graph.txt")
    if length is not None:
        _check_sequence(options, length, lengths)
    elif folder is not None and lengths and options.graph == folder and not sizes_in(folder):
        known = " or ".join(map(str, lengths))
        raise UserError(
            f"{folder}: has profiles of several sequence lengths: add --sequence {known}"
        )
    return options


def _check_sequence(options: Options, length: int, lengths: Sequence[int]) -> None:
    """Raises UserError unless the profiles that the options name have this many tokens."""
    graph = options.graph
    named = [options]
    if isinstance(graph, Path) and graph.is_dir():
        folders = [graph, *(sequence_folder(graph, each) for each in lengths)]
        found = (folder_of(each, size) for each in folders for size in sizes_in(each))
        paths = (*found, *folders[1:])
        named = [replace(options, graph=path / "graph.txt", profile=None) for path in paths]
    profiles = [each for each in map(any_profile, named) if each is not None]
    if profiles and all(each.tokens == length for each in profiles):
        return
    where = "the profile" if isinstance(graph, ModelInMemory) else str(graph)
    if not profiles:
        raise UserError(
            f"--sequence {length}: there is no profile.json in {where} to say how long sequences"
            f" are: make one with pd-profile MODEL --sequence {length}"
        )
    known = sorted({each.tokens for each in profiles if each.tokens is not None})
    has = f"has {' and '.join(map(str, known))} tokens" if known else "has no sequences of tokens"
    raise UserError(f"--sequence {length}: {where} {has}: {_making(profiles, length)}")


def _making(profiles: Sequence[Profile], length: int) -> str:
    """The command that makes what is missing."""
    first = profiles[0]
    if not first.model.startswith("transformers:"):
        return f"profile the model with inputs of {length} tokens, with pd-profile --input"
    args = {name: value for name, value in first.args.items() if "position" not in name}
    sizes = sorted({each.batch_size for each in profiles})
    counts = ",".join(map(str, sizes))
    words = [
        f"pd-profile {first.model}",
        *(f"--arg {name}={value}" for name, value in args.items()),
        f"--batch-size{'s' * (len(sizes) > 1)} {counts}",
        f"--sequence {length}",
        *(["--for DEVICE"] if first.estimated else []),
    ]
    return f"make it with {' '.join(words)} and -o another folder"


def options_by_size(options: Options) -> dict[int, Options | None]:
    """The options for each batch size in the folder GRAPH, smallest first; None for sizes that do
    not divide --global-batch.

    Raises UserError if options contradict each other, or there is no size to plan for.
    """
    folder, whole = options.graph_path, options.global_batch
    _check_by_size(options)
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


def _check_by_size(options: Options) -> None:
    folder = options.graph_path
    if options.calibrate:
        raise UserError(
            f"--calibrate: a run has one batch size: name the graph.txt of that one in {folder}"
        )
    if options.again:
        raise UserError(f"--again: name the graph.txt of one batch size in {folder}")
    if "profile" in options.typed:
        raise UserError(f"--profile: in {folder} each batch size has its own: leave it out")
    if options.output is not None and options.output.resolve() == folder.resolve():
        raise UserError(f"-o {folder}: this is the profile folder: choose another")
    if options.global_batch is not None and "microbatches" in options.typed:
        raise UserError(
            "--global-batch and --microbatches both set the examples per update: give one of them"
        )


def tasks_by_size(
    by_size: Mapping[int, Options | None], folder: Path
) -> dict[int, tuple[Options, Task]]:
    """Makes the task of each batch size. Raises UserError if they are not of one model."""
    tasks = {}
    for size, options in by_size.items():
        if options is None:
            continue
        task = make_task(options)
        if task.batch_size not in (None, size):
            raise UserError(
                f"{options.profile_path}: batch_size is {task.batch_size}, but the folder's name"
                f" says {size}: profile this size again"
            )
        tasks[size] = options, replace(task, batch_size=size)
    check_alike({size: task.profiled for size, (_, task) in tasks.items()}, folder)
    return tasks
