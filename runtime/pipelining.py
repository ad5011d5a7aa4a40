"""A plan as torch's own pipelining takes it: a `split_policy`, from export-torch.json."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
import torch.distributed.pipelining  # registers the operator that marks a split
from pydantic import BaseModel, ConfigDict, Field
from torch import fx

from pipedream.graph.errors import UserError, read_artifact


class TorchOrderFile(BaseModel):
    """`file`: the CSV beside this file, for `microbatches` of a step; the stages are on
    `stage_ranks`, ranks of one pipeline.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str
    microbatches: int = Field(ge=1)
    stage_ranks: tuple[int, ...] = Field(min_length=1)


class TorchSplit(BaseModel):
    """`stages`: the operators, by their names in the exported graph, whose results leave a node of
    the stage. `torch`: the version that gave them these names. `order`: of the passes, if torch can
    run the plan's.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["pipedream-torch-split/1"] = "pipedream-torch-split/1"
    model: str
    torch: str
    stages: tuple[tuple[str, ...], ...] = Field(min_length=1)
    order: TorchOrderFile | None = None


def split_policy(path: Path | str) -> Callable[[fx.GraphModule], fx.GraphModule]:
    """For torch.distributed.pipelining.pipeline(model, mb_args, split_policy=split_policy(path)).

    `path` is the export-torch.json of pd-optimize. The model must be in training mode, as it was
    profiled. Raises UserError if the file cannot be read; the policy does where the model is not
    the one that was profiled.
    """
    path = Path(path)
    split = read_artifact(path, TorchSplit)

    def policy(module: fx.GraphModule) -> fx.GraphModule:
        stage_of = _stages(module.graph, split, path)
        _pass_on_inputs(module.graph, stage_of)
        _put_in_order(module.graph, stage_of, len(split.stages))
        module.recompile()
        return module

    return policy


def _stages(graph: fx.Graph, split: TorchSplit, path: Path) -> dict[fx.Node, int]:
    """Returns the stage of every operator.

    One that is not named is needed within its own node alone, and goes where it is read; or it is
    a constant, such as a mask, which every stage that reads it makes for itself. What nobody reads,
    such as a count of batches that is kept, goes with what it reads.
    """
    named = {name: stage for stage, names in enumerate(split.stages) for name in names}
    operators = [node for node in graph.nodes if node.op == "call_function"]
    missing = named.keys() - {node.name for node in graph.nodes}
    if missing:
        raise UserError(
            f"{path}: operator {min(missing)} is not in the model given: it was made for"
            f" {split.model} with torch {split.torch}; run pd-profile and pd-optimize again"
        )
    stage_of = {node: named[node.name] for node in operators if node.name in named}
    for node in reversed(operators):
        readers = {stage_of[user] for user in node.users if user in stage_of}
        if node not in stage_of and readers:
            first, *others = sorted(readers)
            stage_of[node] = first
            for stage in others:
                stage_of[_copy_for(graph, node, stage, stage_of)] = stage
    for node in operators:
        if node not in stage_of:
            beside = {user for source in node.all_input_nodes for user in source.users} | {
                *node.all_input_nodes
            }
            stage_of[node] = max((stage_of[near] for near in beside if near in stage_of), default=0)
    return stage_of


def _pass_on_inputs(graph: fx.Graph, stage_of: dict[fx.Node, int]) -> None:
    """Has the first stage send the inputs of the model that later stages read: torch does not."""
    for source in [node for node in graph.nodes if node.op == "placeholder"]:
        readers = [user for user in source.users if stage_of.get(user, 0) > 0]
        if readers:
            with graph.inserting_after(source):
                sent = graph.call_function(torch.ops.aten.clone.default, (source,))
            root = list(readers[0].meta["nn_module_stack"].items())[:1]
            sent.meta = {**source.meta, "nn_module_stack": dict(root)}
            stage_of[sent] = 0
            for reader in readers:
                reader.replace_input_with(source, sent)


def _copy_for(graph: fx.Graph, node: fx.Node, stage: int, stage_of: dict[fx.Node, int]) -> fx.Node:
    """Returns a copy of `node` that the operators of this stage read in its place."""
    with graph.inserting_after(node):
        copy = graph.node_copy(node)
    for user in list(node.users):
        if stage_of.get(user) == stage:
            user.replace_input_with(node, copy)
    return copy


def _put_in_order(graph: fx.Graph, stage_of: dict[fx.Node, int], stages: int) -> None:
    """Sorts by stage, with a `pipe_split` before each but the first; keeps the order within."""
    output = next(node for node in graph.nodes if node.op == "output")
    ordered: list[Sequence[fx.Node]] = [
        [node for node, at in stage_of.items() if at == stage] for stage in range(stages)
    ]
    position = {node: index for index, node in enumerate(graph.nodes)}
    for stage, nodes in enumerate(ordered):
        with graph.inserting_before(output):
            if stage:
                graph.call_function(torch.ops.pippy._pipe_split.default)
        for node in sorted(nodes, key=position.__getitem__):
            output.prepend(node)
