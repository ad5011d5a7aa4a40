"""The profile of a model on a device that is not at hand: nothing of the model is computed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from pipedream.capture.captured import Captured, flatten_inputs
from pipedream.capture.compute_settings import CPU, Precision
from pipedream.capture.fake_tensors import capture_fake
from pipedream.capture.grouping import undivided
from pipedream.capture.sources.load import Loaded
from pipedream.graph.errors import UserError
from pipedream.graph.placements.operators import Operator, OperatorGraph, flops_of
from pipedream.graph.profile import Estimated, Machine, Quartiles
from pipedream.profiler.assembly import (
    Measured,
    Measurements,
    Settings,
    machine_of,
    profile_of,
    timed_graph,
)
from pipedream.profiler.collecting import without_collecting
from pipedream.profiler.estimate.device_file import DeviceFile
from pipedream.profiler.estimate.footprints import memory_of
from pipedream.profiler.estimate.node_times import (
    NodeSeconds,
    call_seconds,
    node_seconds,
    weight_parts,
)
from pipedream.profiler.estimate.roofline import Roofline
from pipedream.profiler.estimate.updates import gradient_sum_rate, updates
from pipedream.profiler.measure import ending_of
from pipedream.profiler.operators import in_one_line, trace
from pipedream.profiler.timing.backward_split import BackwardSplit
from pipedream.profiler.timing.local_operators import time_local_operators
from pipedream.profiler.timing.times import Times, Timing

_COPIED = 0.8
"""The part of a link's bandwidth that copies of pinned memory get, after headers and requests:
50 to 55 of 64 GB/s over PCI Express 5.0 x16.
"""


def estimate(
    loaded: Loaded,
    settings: Settings,
    device: DeviceFile,
    progress: Callable[[str], None] = lambda what: None,
    fp8: bool = False,
) -> Measured:
    """Estimates what `measure` measures; `loaded` is a model without memory. `progress` is told
    what begins. `fp8`: what if products were computed in it, on a device that does. Raises
    UserError if the model cannot be captured, or its passes not be traced.
    """
    with without_collecting():
        return _estimate(loaded, settings, device, progress, fp8)


def _estimate(
    loaded: Loaded,
    settings: Settings,
    device: DeviceFile,
    progress: Callable[[str], None],
    fp8: bool,
) -> Measured:
    precision, inputs = Precision(loaded.autocast, CPU), flatten_inputs(loaded.args, loaded.kwargs)
    progress("capturing")
    # Whoever trains the model captures it again, and sees then whether each call is as the last.
    captured = capture_fake(loaded.model, loaded.args, loaded.kwargs, precision, again=False)
    settings.check(captured.graph)
    progress("tracing")
    ending = ending_of(loaded, captured)
    try:
        traced = trace(captured, inputs, CPU, precision.computing(), *ending)
    except Exception as error:  # whatever torch raises of operators that cannot be traced
        raise UserError(
            f"--for: the operators of {settings.model} cannot be had: {in_one_line(error)}: measure"
            " it on a device, with --meta if it is larger than memory"
        ) from error
    progress("estimating")
    roofline, attributed = Roofline(device, fp8), traced.attributed
    calls = call_seconds(attributed.graph, attributed.backward, roofline)
    parts = weight_parts(attributed)
    nodes = node_seconds(attributed, calls, parts)
    read = [captured.values[name].node for name in captured.inputs]
    memory = memory_of(attributed, read, captured.graph.order, parts)
    times = _times(captured, nodes)
    graph = timed_graph(captured, times)
    measured = Measurements(
        captured,
        _machine(settings, device),
        times,
        memory.footprints,
        _splits(captured, nodes, memory.kept),
        updates(captured, roofline),
        gradient_sum_rate(captured, roofline),
        flops=flops_of(attributed.graph),
        estimated=_estimated(roofline, attributed.graph),
    )
    alone = partial(_alone, roofline)
    local_seconds = time_local_operators(
        attributed.graph, attributed.nodes, calls, settings.shards, alone, at_once=alone
    )
    operators = traced.profile(
        settings.batch_size, captured.graph.fingerprint, calls, local_seconds
    )
    profile = profile_of(measured, graph, settings)
    return Measured(graph, profile, operators, undivided(captured))


def _times(captured: Captured, nodes: Mapping[str, NodeSeconds]) -> Times:
    def timing(name: str) -> Timing:
        if name not in nodes:
            return Timing.nothing()
        forward = Quartiles.of([nodes[name].forward])
        return Timing(forward, Quartiles.of([nodes[name].backward]), forward)

    return Times({name: timing(name) for name in captured.graph.nodes}, warmup=0, repeats=1)


def _splits(
    captured: Captured, nodes: Mapping[str, NodeSeconds], kept: Mapping[str, int]
) -> dict[str, BackwardSplit]:
    def split(name: str) -> BackwardSplit:
        own = nodes.get(name)
        if own is None or not own.backward:
            return BackwardSplit(1.0, kept[name])
        return BackwardSplit(1.0 - own.weight / own.backward, kept[name])

    return {name: split(name) for name in captured.graph.nodes}


def _machine(settings: Settings, device: DeviceFile) -> Machine:
    machine = machine_of(settings)
    return machine.model_copy(update={"device": device.device, "device_name": device.name})


def _estimated(roofline: Roofline, graph: OperatorGraph) -> Estimated:
    device = roofline.device
    counts: dict[str, float] = defaultdict(float)
    for call in graph.calls:
        work = roofline.work(call.operator)
        if work is not None:
            counts[work.dtype] += work.flops
    peak = device.peak.get(max(counts, key=lambda dtype: counts[dtype])) if counts else None
    error = None if roofline.fp8 else device.error
    to_host = device.host_bandwidth
    return Estimated(
        device=device.name,
        error=None if error is None else error.model,
        worst=None if error is None else error.worst,
        peak=peak or max(device.peak.values()),
        host_bandwidth=None if to_host is None else to_host * _COPIED,
        fp8=roofline.fp8,
    )


def _alone(
    roofline: Roofline, operators: Iterable[Operator], **_: float
) -> dict[Operator, float | None]:
    """Estimates operators as `time_local_operators` asks for, which takes no time worth a limit."""
    return {each: roofline.seconds(each) for each in operators}
