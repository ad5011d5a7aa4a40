"""How the devices of each stage hold its parameters, as torch's DTensor says it.

A JSON file beside the split of the model: for each stage the shape of its mesh, null if it has
none, and by the name of each parameter the placements that `torch.distributed.tensor` has,

    {"mesh": [2, 2], "parameters": {"up.weight": ["Shard(0)", "Replicate()"]}}

in the order of `distribute_tensor(parameter, mesh, placements)`. Chunked shards are
`_StridedShard(0, split_factor=3)`, whose name has an underscore.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipedream.graph.placements.placement import (
    Mesh,
    Placement,
    Placements,
    Replicate,
    Shard,
    parse_placements,
    show_placements,
)
from pipedream.graph.placements.regions import local_sizes
from pipedream.graph.plan import Plan, Stage

FORMAT = "pipedream-dtensor/1"


def dtensor_file(plan: Plan, modules: Sequence[Sequence[str]] | None = None) -> Mapping[str, Any]:
    """The content of the file. `modules`: of each stage, if they take parameters to other stages
    than the plan; then all stages have the same mesh.
    """
    stages = [(stage.mesh, _placed(stage)) for stage in plan.stages]
    if modules is not None:
        stages = [
            (mesh, _moved([placed for _, placed in stages], modules, stage))
            for stage, (mesh, _) in enumerate(stages)
        ]
    return {
        "format": FORMAT,
        "stages": [
            {
                "mesh": mesh,
                "parameters": {name: list(map(_show, its)) for name, its in placed.items()},
            }
            for mesh, placed in stages
        ],
    }


def notes(plan: Plan, shapes: Mapping[str, tuple[int, ...]]) -> Iterable[str]:
    """Yields what DTensor has not, or has otherwise; `shapes`: of the whole parameters."""
    placed = [(stage.mesh or (), *each) for stage in plan.stages for each in _placed(stage).items()]
    chunked = {
        name: its
        for _, name, its in placed
        if any(isinstance(each, Shard) and each.chunks > 1 for each in its)
    }
    if chunked:
        name, its = next(iter(chunked.items()))
        yield (
            f"{_these(name, len(chunked))} {show_placements(its)}: DTensor has that as"
            " _StridedShard alone, a name with an underscore that may change"
        )
    again = [name for name, its in chunked.items() if _is_divided_again(its)]
    if again:
        name = again[0]
        yield (
            f"{_these(name, len(again))} divided again along that dimension: DTensor divides so and"
            " cannot gather such parts"
        )
    uneven = [
        name for mesh, name, its in placed if name in shapes and _is_uneven(shapes[name], mesh, its)
    ]
    if uneven:
        yield (
            f"{_these(uneven[0], len(uneven))} not divided evenly: DTensor's parts are as"
            " torch.chunk's (9 over 4: 3, 3, 3, 0), and pd-train's differ by at most one"
        )


def _placed(stage: Stage) -> dict[str, Placements]:
    texts = {} if stage.placements is None else stage.placements.parameters
    return {name: parse_placements(text) for name, text in texts.items()}


def _moved(
    placed: Sequence[Mapping[str, Placements]], modules: Sequence[Sequence[str]], stage: int
) -> dict[str, Placements]:
    """Returns those within modules of the stage, and those of the stage that are in no module."""
    inside = tuple(f"{module}." for module in modules[stage])
    anywhere = tuple(f"{module}." for own in modules for module in own)
    return {
        name: its
        for own, names in enumerate(placed)
        for name, its in names.items()
        if name.startswith(inside) or (own == stage and not name.startswith(anywhere))
    }


def _is_divided_again(placements: Placements) -> bool:
    """Tells whether another axis divides the dimension of a chunked shard."""
    dims = [each.dim for each in placements if isinstance(each, Shard)]
    chunked = {e.dim for e in placements if isinstance(e, Shard) and e.chunks > 1}
    return any(dims.count(dim) > 1 for dim in chunked)


def _is_uneven(shape: tuple[int, ...], mesh: Mesh, placements: Placements) -> bool:
    return any(len(local_sizes(size, mesh, placements, dim)) > 1 for dim, size in enumerate(shape))


def _these(name: str, count: int) -> str:
    return f"{name} is" if count == 1 else f"{name} and {count - 1} more are"


def _show(placement: Placement) -> str:
    if isinstance(placement, Replicate):
        return "Replicate()"
    assert isinstance(placement, Shard), "parameters are no sums"
    if placement.chunks > 1:
        return f"_StridedShard({placement.dim}, split_factor={placement.chunks})"
    return f"Shard({placement.dim})"
