"""Captures a model as a graph by torch.export, with one node per innermost module."""

from __future__ import annotations

import io
import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from pipedream.capture.autograd_functions import functions_as_operators
from pipedream.capture.captured import Captured, OutSpec, Value, flatten_inputs, leaves_node
from pipedream.capture.checks.autograd_check import check_backward_passes, functions_on_gradients
from pipedream.capture.checks.determinism_check import export_deterministic
from pipedream.capture.compute_settings import IN_FULL, Precision, eval_mode
from pipedream.capture.errors.capture_errors import (
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
from pipedream.capture.errors.user_code import check_call, place
from pipedream.capture.fake_values import CannotRun, fake_values, run_fake
from pipedream.capture.grouping import OperatorGroup, constants, group_by_module
from pipedream.capture.rewrites.constant_masks import leave_out_masks
from pipedream.capture.rewrites.functionalize import make_dense, make_functional, writes_parameter
from pipedream.capture.rewrites.no_grad import inference_as_no_grad
from pipedream.capture.rewrites.recording import Recording
from pipedream.capture.rewrites.unlift import unlift
from pipedream.capture.rewrites.writes import written_attributes
from pipedream.graph.errors import UserError
from pipedream.graph.model import Graph, Node


@torch.inference_mode(False)
@torch.enable_grad()
def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    training: bool = True,
    precision: Precision = IN_FULL,
    again: bool = True,
) -> Captured:
    """Captures `model` as it runs on these inputs in this precision, in the modes in which its
    modules are; without `training` in eval mode. `again`: a model whose attributes change as it
    runs is captured twice, to see whether that changes what it computes.

    The graph is the same whether or not gradients are enabled where it is called: regions of the
    model without gradient are nodes of it. Raises UserError with the reason if torch.export cannot
    capture the model, or if the model is not a fixed sequence of operators on tensors of fixed
    shapes.
    """
    distinct: tuple[tuple[Any, ...], dict[str, Any]] = _distinct((args, dict(kwargs or {})))
    args, kwargs = distinct
    count = len(args) + len(kwargs)
    check_call(f"{type(model).__name__}, given {count} inputs", model.forward, args, kwargs)
    with nullcontext() if training else eval_mode(model):
        return _capture(model, args, kwargs, precision, again)


def _capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    precision: Precision,
    again: bool,
) -> Captured:
    check_model(model)
    check_inputs(model, args, kwargs)
    with precision.capturing():
        program = export_deterministic(
            model,
            lambda: _export(model, args, kwargs),
            lambda: model(*args, **kwargs),
            again,
        )
    module, out_spec = unlift(program, model)
    check_operators(module, model)
    if (writer := writes_parameter(module)) is not None:
        reason = "it writes into a parameter, and a pipeline keeps several versions of it"
        raise cannot_capture(
            model, f"{reason}; make it a buffer, or leave it to the optimizer", place_of(writer)
        )
    _check_state(module, model)
    make_functional(module)
    make_dense(module)
    fixed = constants(module)
    leave_out_masks(module, fixed)
    (end,) = module.graph.find_nodes(op="output")
    outputs = tuple(value.name for value in end.args[0])
    operators = [node for node in module.graph.nodes if node.op == "call_function"]
    groups = group_by_module([node for node in operators if node not in fixed], module, model)
    if not groups:
        raise UserError(f"{type(model).__name__} runs no operator: there is nothing to measure")
    try:
        return _assemble(module, groups, outputs, out_spec, precision)
    except CannotRun as error:  # an operator that can be exported but not run
        raise capture_error(error.cause, model, place_of(error.node)) from error


def _distinct(inputs: Any) -> Any:
    """The same inputs with a tensor of its own in each place. Where labels are the tokens, the same
    object, torch.export has both read one of the two.
    """
    seen: set[int] = set()

    def distinct(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in seen or tensor.is_inference():  # which autograd refuses
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)
        seen.add(id(tensor))
        return tensor

    return pytree.tree_map_only(torch.Tensor, distinct, inputs)


def _export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    """The graph of one example has the operators of that of two."""
    recording = Recording(model)
    program = _export_as(model, args, kwargs, recording)
    two: Any = pytree.tree_map_only(torch.Tensor, _two_examples, (args, kwargs))
    if recording.doubtful and any(
        one.shape != other.shape
        for one, other in zip(flatten_inputs(args, kwargs), flatten_inputs(*two), strict=True)
    ):
        more = _recorded(model, two[0], two[1])
        if len(more.contiguous) == len(recording.contiguous) and more.contiguous != (
            recording.contiguous
        ):
            program = _export_as(model, args, kwargs, Recording(model, as_in=more))
    return program


def _recorded(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recording:
    """Returns the recording of an export: for this a run without values does, which takes a third
    of the time, and an export where the model cannot run so.
    """
    recording = Recording(model)
    try:
        with _recording(model, recording):
            run_fake(model, args, kwargs)
    except Exception:  # the model's code may raise anything
        recording = Recording(model)
        with suppress(UserError):
            _export_as(model, args, kwargs, recording)
    return recording


def _two_examples(tensor: torch.Tensor) -> torch.Tensor:
    """Of one example."""
    if not tensor.dim() or tensor.shape[0] != 1:
        return tensor
    return tensor.detach().repeat(2, *[1] * (tensor.dim() - 1)).requires_grad_(tensor.requires_grad)


@contextmanager
def _recording(model: nn.Module, recording: Recording) -> Iterator[Counter[str]]:
    """Context of an export, or of a run like it; gives the functions called on gradients."""
    with (
        _suppress_output(),
        functions_as_operators(),
        inference_as_no_grad(),
        recording,
        functions_on_gradients(model) as called,
        recording.watching_buffers(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield called


def _export_as(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], recording: Recording
) -> ExportedProgram:
    try:
        with (
            noting_lines(),
            _recording(model, recording) as called,
            model.register_forward_hook(check_output),
        ):
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
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    for node in module.graph.nodes:
        for state in written_attributes(node):
            if state not in buffers:
                reason = f"it writes into {state}, which is no buffer: register it as one"
                raise cannot_capture(model, reason, place_of(node))


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
        for name, fake in fake_values(module, precision).items()
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
            if node.op != "placeholder"
            and node.name in values
            and leaves_node(node, owner, returned)
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
