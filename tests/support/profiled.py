"""Profiles made by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipedream.graph.model import Graph
from pipedream.graph.profile import (
    Machine,
    Profile,
    ProfiledNode,
    ProfiledTensor,
    Quartiles,
    Totals,
)

MACHINE = Machine(device="cpu", device_name="abacus", threads=1, python="3.11", torch="2.13")


def seconds(median: float, spread: float = 0.1) -> Quartiles:
    """Quartiles at a tenth of the median from it, or what `spread` says."""
    return Quartiles(median=median, lower=median * (1 - spread), upper=median * (1 + spread))


def layer(
    name: str,
    op: str = "Linear",
    forward: float = 1.0,
    backward: float = 2.0,
    output: int = 100,
    spread: float = 0.1,
    **more: Any,
) -> ProfiledNode:
    """A node of module `name`; its times in milliseconds. Both halves of its backward pass take
    the same time.
    """
    tensor = ProfiledTensor(name="x", shape=(1,), dtype="float32", bytes=output, requires_grad=True)
    fields: dict[str, Any] = {"saved_bytes": 50, "workspace_bytes": 70, "parameter_bytes": 40}
    fields |= {
        "id": f"node_{name}",
        "description": f"{op}()",
        "op": op,
        "module": name,
        "inputs": (),
        "parameters": (),
        "outputs": (tensor,),
        "forward_seconds": seconds(forward * 1e-3, spread),
        "backward_seconds": seconds(backward * 1e-3, spread),
        "backward_input_seconds": seconds(backward * 1e-3 / 2, spread),
        "backward_weight_seconds": seconds(backward * 1e-3 / 2, spread),
        "kept_bytes": 30,
    }
    return ProfiledNode(**(fields | more))


def profile(*nodes: ProfiledNode, **changes: Any) -> Profile:
    """Of these nodes, for a minibatch of 8 where `changes` say nothing else."""
    fields: dict[str, Any] = {
        "model": "handmade:net",
        "args": {},
        "batch_size": 8,
        "warmup": 1,
        "repeats": 5,
        "machine": MACHINE,
        "graph_fingerprint": "f",
        "totals": Totals(
            forward_seconds=sum(node.forward_seconds.median for node in nodes),
            backward_seconds=sum(node.backward_seconds.median for node in nodes),
            parameter_bytes=sum(node.parameter_bytes or 0 for node in nodes),
            activation_bytes=sum(tensor.bytes for node in nodes for tensor in node.outputs),
        ),
        "nodes": nodes,
    }
    return Profile(**(fields | changes))


def profile_of(
    graph: Graph, nodes: Mapping[str, Mapping[str, Any]] | None = None, **changes: Any
) -> Profile:
    """That of `graph`, its nodes but for what `nodes` says of them by their ids."""
    profiled = [
        layer(
            name,
            spread=0.0,
            id=name,
            description=node.description,
            forward=node.forward_seconds * 1e3,
            backward=node.backward_seconds * 1e3,
            **(nodes or {}).get(name, {}),
        )
        for name, node in graph.nodes.items()
    ]
    return profile(*profiled, **({"graph_fingerprint": graph.fingerprint} | changes))


def leaving(name: str, bytes: int = 8) -> tuple[ProfiledTensor, ...]:
    """One tensor of a node."""
    return (
        ProfiledTensor(name=name, shape=(1,), dtype="float32", bytes=bytes, requires_grad=True),
    )
