"""Captures a model as a graph by torch.export, with one node per innermost module."""

from __future__ import annotations

import io
import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.utils import _pytree as pytree

from pipedream.capture.autograd_functions import functions_as_operators
from pipedream.capture.capture_errors import (
    FirstUseOfData,
    cannot_capture,
    capture_error,
    check_inputs,
    check_model,
    check_operators,
    check_output,
    noting_lines,
    place_of,
)
from pipedream.capture.checks.autograd_check import check_backward_passes, functions_on_gradients
from pipedream.capture.checks.determinism_check import export_deterministic
from pipedream.capture.compute_settings import IN_FULL, Precision, eval_mode
from pipedream.capture.constants import constants
from pipedream.capture.grouping import OperatorGroup, group_by_module
from pipedream.capture.rewrites.functionalize import make_dense, make_functional, writes_parameter
from pipedream.capture.rewrites.no_grad import inference_as_no_grad, inline_no_grad
from pipedream.capture.rewrites.recording import Recording
from pipedream.capture.rewrites.writes import changes_something, written_attributes
from pipedream.capture.sources.user_code import check_call, place
from pipedream.graph.errors import UserError
from pipedream.graph.model import Graph, Node


@dataclass(frozen=True)
class Value:
    """A tensor of the captured model: `name` in the fx graph, computed by graph node `node`.

    `requires_grad`: whether it has a gradient, where all outputs of the model have one. That of
    what is detached afterwards, or of a comparison alone, is none rather than zero: what has made
    it does not learn from it, and an optimizer leaves it as it is.
    """

    name: str
    node: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class OutSpec:
    """The structure that a model returns: a pytree, and by index the leaves that are no tensor."""

    tree: pytree.TreeSpec
    fixed: Mapping[int, Any]


@dataclass(frozen=True)
class Captured:
    """A model as a graph of nodes over an fx graph of ATen operators.

    `graph`: structure and sizes, without times. Ids are node1, node2, ... in order of execution;
    the inputs of the model come first, as `Input0`, `Input1`, ...
    `module`: the fx graph, with a placeholder for each input tensor (flattened) and parameters,
    buffers and constants as get_attr under their qualified names. It writes in place only to
    buffers.
    `owner`: the graph node of each fx node (placeholders and operators) except constants, which
    every part of the model computes itself. `values`: each tensor that has an owner.
    `inputs`, `outputs`: names of the values that the model takes and returns; `out_spec`: the
    structure that it returns.
    `module_paths`: the module that each graph node is a call of, or for a functional operator the
    module that calls it. `parameters`: qualified names of the parameters that each node reads.
    `precision`: the one in which the values have the types that `values` says; whoever runs a part
    of the model does so in it.
    """

    graph: Graph
    module: fx.GraphModule
    owner: Mapping[str, str]
    values: Mapping[str, Value]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    out_spec: OutSpec
    module_paths: Mapping[str, str]
    parameters: Mapping[str, tuple[str, ...]]
    precision: Precision

    @property
    def working(self) -> tuple[str, ...]:
        """The graph nodes except inputs, in the order of the graph."""
        return tuple(name for name in self.graph.order if not self.graph.nodes[name].is_input)

    @property
    def returning(self) -> str:
        """The last graph node that gives an output of the model."""
        return max((self.owner[name] for name in self.outputs), key=self.graph.order.index)


def rebuild(outputs: Sequence[torch.Tensor], out_spec: OutSpec) -> Any:
    """The structure that the model returns, from the tensors named in `Captured.outputs`."""
    tensors, fixed = iter(outputs), out_spec.fixed
    leaves = [
        fixed[index] if index in fixed else next(tensors)
        for index in range(out_spec.tree.num_leaves)
    ]
    return pytree.tree_unflatten(leaves, out_spec.tree)


def flatten_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The input tensors of a call in the order of `Captured.inputs`."""
    leaves, _ = pytree.tree_flatten((args, dict(kwargs)))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


@torch.inference_mode(False)
@torch.enable_grad()
def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    training: bool = True,
    precision: Precision = IN_FULL,
) -> Captured:
    """Captures `model` as it runs on these inputs in this precision, in the modes in which its
    modules are; without `training` in eval mode.

    The graph is the same whether or not gradients are enabled where it is called: regions of the
    model without gradient are nodes of it. Raises UserError with the reason if torch.export cannot
    capture the model, or if the model is not a fixed sequence of operators on tensors of fixed
    shapes.
    """
    own: tuple[tuple[Any, ...], dict[str, Any]] = _distinct((args, dict(kwargs or {})))
    args, kwargs = own
    count = len(args) + len(kwargs)
    check_call(f"{type(model).__name__}, given {count} inputs", model.forward, args, kwargs)
    with nullcontext() if training else eval_mode(model):
        return _capture(model, args, kwargs, precision)


def _capture(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], precision: Precision
) -> Captured:
    check_model(model)
    check_inputs(model, args, kwargs)
    with precision.capturing():
        program = export_deterministic(
            model, lambda: _export(model, args, kwargs), lambda: model(*args, **kwargs)
        )
    module, out_spec = _unlift(program, model)
    check_operators(module, model)
    if (writer := writes_parameter(module)) is not None:
        reason = "it writes into a parameter, and a pipeline keeps several versions of it"
        raise cannot_capture(
            model, f"{reason}; make it a buffer, or leave it to the optimizer", place_of(writer)
        )
    _check_state(module, model)
    make_functional(module)
    make_dense(module)
    outputs = _outputs(module)
    fixed = constants(module)
    operators = [node for node in module.graph.nodes if node.op == "call_function"]
    groups = group_by_module([node for node in operators if node not in fixed], module, model)
    if not groups:
        raise UserError(f"{type(model).__name__} runs no operator: there is nothing to measure")
    try:
        return _assemble(module, groups, outputs, out_spec, precision)
    except _CannotRun as error:  # an operator that can be exported but not run
        raise capture_error(error.cause, model, place_of(error.node)) from error


def _distinct(inputs: Any) -> Any:
    """The same inputs with a tensor of its own in each place. Where labels are the tokens, the same
    object, torch.export has both read one of the two.
    """
    seen: set[int] = set()

    def own(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in seen or tensor.is_inference():  # which autograd refuses
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)
        seen.add(id(tensor))
        return tensor

    return pytree.tree_map_only(torch.Tensor, own, inputs)


def _export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    """The graph of one example has the operators of that of two."""
    recording = Recording(model)
    program = _export_as(model, args, kwargs, recording)
    two: Any = pytree.tree_map_only(torch.Tensor, _two_examples, (args, kwargs))
    if recording.doubtful and any(
        one.shape != other.shape
        for one, other in zip(flatten_inputs(args, kwargs), flatten_inputs(*two), strict=True)
    ):
        more = Recording(model)
        with suppress(UserError):
            _export_as(model, two[0], two[1], more)
        if len(more.contiguous) == len(recording.contiguous) and more.contiguous != (
            recording.contiguous
        ):
            program = _export_as(model, args, kwargs, Recording(model, as_in=more))
    return program


def _two_examples(tensor: torch.Tensor) -> torch.Tensor:
    """Of one example."""
    if not tensor.dim() or tensor.shape[0] != 1:
        return tensor
    return tensor.detach().repeat(2, *[1] * (tensor.dim() - 1)).requires_grad_(tensor.requires_grad)


def _export_as(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], recording: Recording
) -> ExportedProgram:
    try:
        with (
            _suppress_output(),
            noting_lines(),
            functions_as_operators(),
            inference_as_no_grad(),
            recording,
            functions_on_gradients(model) as called,
            recording.watching_buffers(),
            model.register_forward_hook(check_output),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            program = torch.export.export(model, args, kwargs, strict=False)
        check_backward_passes(called, program.graph_module)
        return program
    except (Exception, SystemExit) as error:  # the model's code may raise anything
        raise capture_error(error, model, _use_of_data(error, model, args, kwargs)) from error


def _use_of_data(
    error: BaseException, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str:
    """`FILE:LINE: ` where the model uses `.data` of a tensor, if that may be the error's cause."""
    if "exported program constant's list" not in str(error):
        return ""
    try:
        with FirstUseOfData():
            model(*args, **kwargs)
    except Exception as used:
        return place(used)
    return ""


@contextmanager
def _suppress_output() -> Iterator[None]:
    """Keeps log lines and printed graphs of torch.export from stderr; exceptions pass."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _check_state(module: fx.GraphModule, model: nn.Module) -> None:
    """Raises UserError if the model keeps values from call to call otherwise than in buffers."""
    own = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    for node in module.graph.nodes:
        for state in written_attributes(node):
            if state not in own:
                reason = f"it writes into {state}, which is no buffer: register it as one"
                raise cannot_capture(model, reason, place_of(node))


def _outputs(module: fx.GraphModule) -> tuple[str, ...]:
    """The names of the values that the graph gives."""
    (end,) = module.graph.find_nodes(op="output")
    return tuple(value.name for value in end.args[0])


def _unlift(program: ExportedProgram, model: nn.Module) -> tuple[fx.GraphModule, OutSpec]:
    """The program with parameters, buffers and constants as attributes, and how it returns.

    A tied parameter has the first of its names, as in `model.named_parameters()`, and so has a
    buffer of several modules: it is one attribute, lest a write by one name be missed by another.
    """
    attribute_values: dict[str, Any] = {**program.state_dict, **program.constants}
    states = (*model.named_parameters(), *model.named_buffers())
    first = {id(state): name for name, state in states}
    attributes = {
        spec.arg.name: first.get(id(attribute_values[spec.target]), spec.target)
        for spec in program.graph_signature.input_specs
        if spec.kind is not InputKind.USER_INPUT and spec.target is not None
    }
    root = nn.Module()
    graph = fx.Graph()
    renamed: dict[fx.Node, fx.Node] = {}
    made: dict[str, fx.Node] = {}
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder" and node.name in attributes:
            target = attributes[node.name]
            if target not in made:
                _attach(root, target, attribute_values[target])
                made[target] = graph.create_node("get_attr", target, name=node.name)
            renamed[node] = made[target]
        elif node.op == "get_attr":
            _attach(root, node.target, getattr(program.graph_module, node.target))
            renamed[node] = graph.node_copy(node)
        else:
            renamed[node] = graph.node_copy(node, renamed.__getitem__)
        renamed[node].meta = dict(node.meta)
    names, out_spec = _user_outputs(program)
    by_name = {node.name: renamed[node] for node in renamed}
    returned = {name: _computed(by_name[name]) for name in dict.fromkeys(names)}
    graph.output(tuple(returned[name] for name in names))
    module = fx.GraphModule(root, graph)
    inline_no_grad(module)
    _drop_dead(module)
    return module, out_spec


def _computed(value: fx.Node) -> fx.Node:
    """The value; of a parameter or buffer that a model returns as it is, a copy, which an operator
    computes: so a stage has it, and the next minibatches do not change it.
    """
    if value.op != "get_attr":
        return value
    copied = value.graph.call_function(torch.ops.aten.clone.default, (value,))
    copied.meta = dict(value.meta)
    return copied


def _user_outputs(program: ExportedProgram) -> tuple[list[str], OutSpec]:
    """The names of the tensors that the program returns, and the structure that they are in."""
    tree = program.call_spec.out_spec
    assert tree is not None
    specs = program.graph_signature.output_specs
    returned = [spec.arg for spec in specs if spec.kind is OutputKind.USER_OUTPUT]
    fixed = {
        index: each.value
        for index, each in enumerate(returned)
        if isinstance(each, ConstantArgument)
    }
    return [each.name for each in returned if not isinstance(each, ConstantArgument)], OutSpec(
        tree, fixed
    )


def _attach(root: nn.Module, name: str, value: Any) -> None:
    """Sets `root.a.b.c` to a parameter, buffer, constant or submodule."""
    *path, last = name.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = getattr(root, part)
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        root.register_buffer(last, value)
    else:
        setattr(root, last, value)


def _drop_dead(module: fx.GraphModule) -> None:
    """Removes leftovers of the export: assertions, unused values, inputs that are not tensors."""
    for node in reversed(module.graph.nodes):
        if "_assert" in str(node.target) and not node.users:
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code(changes_something)
    for node in list(module.graph.nodes):
        no_tensor = node.op == "placeholder" and not isinstance(node.meta.get("val"), torch.Tensor)
        if no_tensor and not node.users:
            module.graph.erase_node(node)
    module.recompile()


class _CannotRun(Exception):
    """An operator of the graph failed."""

    def __init__(self, node: fx.Node, cause: RuntimeError) -> None:
        super().__init__(node.name)
        self.node, self.cause = node, cause


class _Gradients(fx.Interpreter):
    """Runs the graph on fake tensors of `device` and records the result of every operator.

    Attributes are made fake first. Otherwise torch would compute with real values, and would for
    example count a batch in batch norm that never ran.
    """

    def __init__(self, module: fx.GraphModule, mode: FakeTensorMode, device: torch.device) -> None:
        super().__init__(module)
        self.mode, self.device = mode, device
        self.seen: dict[str, torch.Tensor] = {}

    def fetch_attr(self, target: str) -> Any:
        value = super().fetch_attr(target)
        if not isinstance(value, torch.Tensor):
            return value
        fake = value if isinstance(value, FakeTensor) else self.mode.from_tensor(value)
        if fake.device.type == self.device.type:
            return fake
        return torch.empty_like(fake, device=self.device).requires_grad_(fake.requires_grad)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        placed = {"device": self.device} if kwargs.get("device") is not None else {}
        return super().call_function(target, args, {**kwargs, **placed})

    def run_node(self, n: fx.Node) -> Any:
        try:
            result = super().run_node(n)
        except RuntimeError as error:
            raise _CannotRun(n, error) from error
        if isinstance(result, torch.Tensor) and n.op != "get_attr":
            self.seen[n.name] = result
        return result


def _fake_values(module: fx.GraphModule, precision: Precision) -> dict[str, torch.Tensor]:
    """Every tensor of the graph as a fake tensor: shape, type, and whether it needs gradients.

    They are those of passes on the device of `precision`, for which autocast has rules of its own.
    """
    device = precision.device
    tensors = (*module.parameters(), *module.buffers())
    modes = (tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor))
    mode = next(modes, None) or FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.enable_grad(), precision.computing():
        inputs = [
            torch.empty(node.meta["val"].shape, dtype=node.meta["val"].dtype, device=device)
            for node in module.graph.nodes
            if node.op == "placeholder"
        ]
        interpreter = _Gradients(module, mode, device)
        results = interpreter.run(*inputs)
        return _without_dead_ends(interpreter.seen, results)


def _without_dead_ends(
    values: Mapping[str, torch.Tensor], outputs: Sequence[Any]
) -> dict[str, torch.Tensor]:
    """The values, those detached that no gradient comes to from any of the outputs."""
    tensors = (each for each in outputs if isinstance(each, torch.Tensor))
    waiting = [each.grad_fn for each in tensors if each.grad_fn is not None]
    reached = set(waiting)
    while waiting:
        for function, _ in waiting.pop().next_functions:
            if function is not None and function not in reached:
                reached.add(function)
                waiting.append(function)
    return {
        name: value if value.grad_fn in reached else value.detach()
        for name, value in values.items()
    }


def _assemble(
    module: fx.GraphModule,
    groups: Sequence[OperatorGroup],
    outputs: tuple[str, ...],
    out_spec: OutSpec,
    precision: Precision,
) -> Captured:
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    sources = [OperatorGroup(f"Input{index}", "", [node]) for index, node in enumerate(inputs)]
    named = {f"node{index}": group for index, group in enumerate([*sources, *groups], start=1)}
    owner = {node.name: name for name, group in named.items() for node in group.nodes}
    values = {
        name: Value(name, owner[name], tuple(fake.shape), fake.dtype, fake.requires_grad)
        for name, fake in _fake_values(module, precision).items()
        if name in owner
    }
    known = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    parameters = {
        name: tuple(
            dict.fromkeys(
                str(source.target)
                for node in group.nodes
                for source in node.all_input_nodes
                if source.op == "get_attr" and source.target in known
            )
        )
        for name, group in named.items()
    }
    return Captured(
        graph=_graph(module, named, owner, values, parameters, frozenset(outputs)),
        module=module,
        owner=owner,
        values=values,
        inputs=tuple(node.name for node in inputs),
        outputs=outputs,
        out_spec=out_spec,
        module_paths={name: group.path for name, group in named.items()},
        parameters=parameters,
        precision=precision,
    )


def _graph(
    module: fx.GraphModule,
    named: Mapping[str, OperatorGroup],
    owner: Mapping[str, str],
    values: Mapping[str, Value],
    parameters: Mapping[str, tuple[str, ...]],
    returned: frozenset[str],
) -> Graph:
    seen: set[str] = set()
    nodes: dict[str, Node] = {}
    edges: dict[tuple[str, str], None] = {}
    for name, group in named.items():
        fresh = [parameter for parameter in parameters[name] if parameter not in seen]
        seen.update(fresh)
        sizes = [
            float(values[node.name].bytes)
            for node in group.nodes
            if node.op != "placeholder" and node.name in values and _leaves(node, owner, returned)
        ]
        nodes[name] = Node(
            id=name,
            description=group.description,
            activation_bytes=tuple(sizes) or (0.0,),
            parameter_bytes=float(sum(module.get_parameter(p).nbytes for p in fresh)),
            several_outputs=len(sizes) > 1,
        )
        for node in group.nodes:
            for source in node.all_input_nodes:
                if owner.get(source.name, name) != name:
                    edges[owner[source.name], name] = None
    return Graph(nodes, tuple(edges))


def _leaves(node: fx.Node, owner: Mapping[str, str], returned: frozenset[str]) -> bool:
    """Whether a value is read outside the graph node that computes it."""
    return node.name in returned or any(
        owner.get(user.name, owner[node.name]) != owner[node.name] for user in node.users
    )
