"""Divides a joint graph in three: forward, gradients of the inputs, gradients of the weights.

What earlier stages wait for is computed first (Qi, Wan, Huang, Lin, "Zero Bubble Pipeline
Parallelism", ICLR 2024: B and W). The operator that computes all gradients of a convolution becomes
two.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import fx

from pipedream.capture.programs.batch_norms import DividedBatchNorm
from pipedream.capture.programs.draws import copy_seeded
from pipedream.capture.programs.joint import CannotDivide, Joint
from pipedream.capture.rewrites.writes import is_draw, written

_DIVIDED = torch.ops.aten.convolution_backward.default
"""Its last argument says which gradients it computes: of input, weight and bias. The operators of
batch and layer norm have such an argument too, but they need the sums over the gradients of weight
and bias for that of the input: in two they would compute these twice.
"""

_VIEW = torch.ops.aten.view.default
"""An operator may lay out its result in memory otherwise than in the trace, such as a batch norm of
a transposed tensor. As nothing is written, a reshape gives the same.
"""

_HIDDEN_VIEWS = (torch.ops.aten._unsafe_view.default,)
"""Operators whose schemas do not say that their results share memory with an argument."""


@dataclass(frozen=True)
class Part:
    """Computes the values `results` from the values `needs`, nodes of the joint graph, by running
    `module`.

    It is given a list of the needs in reverse, and takes each out of it. So a value that nobody
    else holds is freed when its last operator is done, as autograd does it.
    """

    module: fx.GraphModule
    needs: Sequence[fx.Node]
    results: Sequence[fx.Node]


@dataclass(frozen=True)
class SplitPasses:
    """Holds the three parts. `forward` also gives what the others need of it. `weights`: one part
    for each parameter with a gradient, in the order in which a backward pass comes to them; each
    also gives what later ones need of it.
    """

    forward: Part
    inputs: Part
    weights: Mapping[str, Part]


def split_passes(joint: Joint) -> SplitPasses:
    """Divides the graph, and backward convolutions in place. Raises CannotDivide."""
    _divide_operators(joint.module.graph)
    order = {node: place for place, node in enumerate(joint.module.graph.nodes)}
    gradients = [node for node in joint.input_gradients if node is not None]
    learned = {name: node for name, node in joint.weight_gradients.items() if node is not None}
    forward = computed_by([*joint.outputs, *writes(joint)])
    inputs = computed_by(gradients) - forward
    weights = _by_weight(forward | inputs, dict(sorted(learned.items(), key=lambda e: order[e[1]])))
    later = _needed(weights.values()) | set(learned.values())

    def sort(nodes: Set[fx.Node]) -> list[fx.Node]:
        return sorted(nodes, key=order.__getitem__)

    saved = sort(forward & (later | _needed([inputs]) | set(gradients)))
    parts, wanted = dict[str, Part](), set[fx.Node]()
    for name, members in reversed(weights.items()):
        end = learned[name]
        parts[name] = _part(joint, members, [end, *sort(members & wanted - {end})])
        wanted.update(parts[name].needs)
    return SplitPasses(
        _part(joint, forward, [*joint.outputs, *saved]),
        _part(joint, inputs, [*gradients, *sort(inputs & later)]),
        dict(reversed(parts.items())),
    )


def _by_weight(done: Set[fx.Node], learned: Mapping[str, fx.Node]) -> dict[str, Set[fx.Node]]:
    """Returns what is computed for each gradient and not done before or for another one."""
    members: dict[str, Set[fx.Node]] = {}
    for name, gradient in learned.items():
        members[name] = computed_by([gradient]) - done
        done |= members[name]
    return members


def _divide_operators(graph: fx.Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=_DIVIDED):
        mask = node.args[-1]
        if not (mask[0] and any(mask[1:])):
            continue
        for half_mask in ([True, False, False], [False, *mask[1:]]):
            with graph.inserting_before(node):
                half = graph.node_copy(node)
                half.update_arg(len(node.args) - 1, half_mask)
            for user in list(node.users):
                if half_mask[user.args[1]]:
                    user.update_arg(0, half)
        for user in list(node.users):  # of a gradient that is not computed
            graph.erase_node(user)
        graph.erase_node(node)


def writes(joint: Joint) -> list[fx.Node]:
    """Returns the operators that write into buffers, such as the statistics of batch norm, those
    that read what was there before, and those that draw, for the sake of the next draw after the
    same seed. Raises CannotDivide if the backward pass needs some of them.
    """
    ends: list[fx.Node] = []
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in joint.module.graph.nodes:
        for target in written(node):
            ends += [*readers.get(memory_of(target), ()), node]
        for source in node.all_input_nodes:
            readers.setdefault(memory_of(source), []).append(node)
        if is_draw(node):
            ends.append(node)
    if not set(joint.tangents).isdisjoint(_needed([computed_by(ends)])):
        raise CannotDivide("the backward pass needs a buffer that the forward pass writes into")
    return ends


def memory_of(node: fx.Node) -> fx.Node:
    """Returns the value whose memory a view shows."""
    while node.op == "call_function" and shares(node) and isinstance(node.args[0], fx.Node):
        if isinstance(node.target, DividedBatchNorm):
            break
        node = node.args[0]
    return node


def computed_by(ends: Iterable[fx.Node]) -> set[fx.Node]:
    """Returns the operators that these values are computed by.

    Of an operator with several results all are taken apart at once: a tuple would hold each of them
    as long as one is needed.
    """
    computing: set[fx.Node] = set()
    left = list(ends)
    while left:
        node = left.pop()
        if node not in computing and node.op == "call_function":
            computing.add(node)
            computing.update(user for user in node.users if user.target is operator.getitem)
            left.extend(node.all_input_nodes)
    return computing


def _needed(members: Iterable[Set[fx.Node]]) -> set[fx.Node]:
    return {source for part in members for node in part for source in node.all_input_nodes}


def _part(joint: Joint, members: Set[fx.Node], results: Sequence[fx.Node]) -> Part:
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    inside = [node for node in joint.module.graph.nodes if node in members]
    read = [source for node in inside for source in node.all_input_nodes] + list(results)
    box, needs = graph.placeholder("box"), []
    for source in dict.fromkeys(read):
        if source.op == "get_attr":
            copies[source] = graph.node_copy(source)
        elif source not in members:
            copies[source] = graph.call_method("pop", (box,))
            needs.append(source)
    copy_seeded(joint.module, graph, inside, copies)
    for view in graph.find_nodes(op="call_function", target=_VIEW):
        view.target = torch.ops.aten.reshape.default
    graph.output(tuple(copies[node] for node in results))
    return Part(fx.GraphModule(joint.module, graph), needs, list(results))


def own_memory(gradients: Mapping[str, fx.Node | None]) -> frozenset[str]:
    """Returns the names of the gradients whose memory no other value of the graph shares."""
    times = Counter(gradients.values())
    return frozenset(
        name for name, node in gradients.items() if node and times[node] == 1 and _is_alone(node)
    )


def _is_alone(node: fx.Node) -> bool:
    """Tells whether the memory of this value leads from its allocation nowhere else."""
    while node.op == "call_function" and len(node.users) == 1:
        source = node.args[0] if node.args else None
        if node.target is operator.getitem:
            assert isinstance(source, fx.Node)
            if not shares(source):
                return True
        elif not shares(node):
            return True
        if not isinstance(source, fx.Node):
            return False
        node = source
    return False


def shares(node: fx.Node) -> bool:
    """Tells whether a result may share memory with an argument."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target in _HIDDEN_VIEWS:
        return True
    arguments = node.target._schema.arguments
    return any(argument.alias_info is not None for argument in arguments)
