"""Profiles made by hand."""

from __future__ import annotations

from typing import Any

from pipedream.profiler.profile import (
    Machine,
    Profile,
    ProfiledNode,
    ProfiledTensor,
    Seconds,
    Totals,
)

MACHINE = Machine(device="cpu", device_name="abacus", threads=1, python="3.11", torch="2.13")


def seconds(median: float, spread: float = 0.1) -> Seconds:
    """Quartiles at a tenth of the median from it, or what `spread` says."""
    return Seconds(median=median, lower=median * (1 - spread), upper=median * (1 + spread))


def layer(
    name: str,
    op: str = "Linear",
    forward: float = 1.0,
    backward: float = 2.0,
    output: int = 100,
    spread: float = 0.1,
    **more: Any,
) -> ProfiledNode:
    """A node of module `name`; its times in milliseconds."""
    tensor = ProfiledTensor(name="x", shape=(1,), dtype="float32", bytes=output, requires_grad=True)
    fields: dict[str, Any] = {"saved_bytes": 50, "workspace_bytes": 70, "parameter_bytes": 40}
    return ProfiledNode(
        id=f"node_{name}",
        description=f"{op}()",
        op=op,
        module=name,
        inputs=(),
        parameters=(),
        outputs=(tensor,),
        forward_seconds=seconds(forward * 1e-3, spread),
        backward_seconds=seconds(backward * 1e-3, spread),
        **(fields | more),
    )


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
