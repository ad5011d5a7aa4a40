"""Times each node in passes of the whole model, and fits them to passes of stretches.

One repeat is a pass of the whole model with a mark at each node, then a pass of the same nodes in
two, four or one stretch without marks, as stages run. The sums over nodes are fitted to the times
of the stretches of the same repeat, so that a slow moment of the machine affects both.

Compiled stages have no nodes that could be timed. Then the stretches are compiled, as stages will
be, and each of the smallest says for its nodes what part of their times it takes. To find out
which way is fastest, all are measured; of groups, those are compiled that are faster so.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import count

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException

from pipedream.capture.captured import Captured
from pipedream.capture.node_modules import preserve_model_state
from pipedream.graph.profile import CompiledWay, ProfiledGroups, Quartiles
from pipedream.graph.run_config import BY_GROUPS
from pipedream.profiler.stretches.division import fit_stretches, stretches
from pipedream.profiler.stretches.group_trial import GroupTrial
from pipedream.profiler.stretches.timed_stretch import (
    BothPasses,
    Division,
    NodeSeconds,
    TimedStretch,
    Way,
    fastest,
    gains,
    run,
    saved_parts,
    seconds_of,
    taking,
    wrong_gradient,
)
from pipedream.profiler.timing.contention import TimedPass
from pipedream.profiler.timing.passes import LOSS, Loss, Stretch, Turn
from pipedream.profiler.timing.stopping_rule import Repeats, StoppingRule, no_garbage_collection
from pipedream.profiler.timing.stopwatch import stopwatch
from pipedream.profiler.timing.times import Times, Timing

_DIVISIONS = (2, 4, 1)
_COMPILED_DIVISIONS = (6, 1)
"""As each stretch takes a while to compile; the first says what each part of a model gains."""
_FURTHER_RUNS = 2
"""Of a stretch, after the one in which it is compiled."""
_RECOMPUTED = 3
"""Every this many repeats, the forward pass runs once more without saving for a backward pass."""


class CannotCompile(Exception):
    """Why stages cannot be compiled, in words."""


def time_in_training(
    captured: Captured,
    inputs: Sequence[Tensor],
    stopping_rule: StoppingRule,
    device: torch.device,
    loss: Loss | None = None,
    progress: Callable[[float], None] = lambda part: None,
    ways: Sequence[Way] = (None,),
) -> Times:
    """Times the nodes of `captured` in passes on `inputs` (in the order of `captured.inputs`).

    The backward pass starts at `loss`, or at random gradients of the outputs without one.
    `progress` is called with the fraction done, from 0 to 1. `ways`: how stages will be compiled,
    or of several that begin with None the fastest. Buffers are restored. Raises CannotCompile if
    the only way cannot be had, or computes other gradients.
    """
    with preserve_model_state(captured), no_garbage_collection(), torch.enable_grad():
        bench = _Bench(captured, inputs, device, loss, ways)
        repeats = Repeats(stopping_rule)
        while repeats.warm(bench.warm_up()):
            pass
        if any(ways):  # compiling takes a while
            progress(0.0)
        bench.divide()
        for number in count():
            more = repeats.go_on(bench.repeat(number))
            progress(repeats.part)
            if not more:
                break
        for further in range(number + 1, len(bench.every) if len(ways) > 1 else 0):
            bench.repeat(further)
        return bench.times(repeats)


def passes(
    captured: Captured,
    inputs: Sequence[Tensor],
    device: torch.device,
    backend: str | None = None,
) -> Callable[[], object]:
    """Returns a function that runs the whole model forward and backward, without timing."""
    watch = stopwatch(device)
    whole = Stretch(captured, captured.working, watch, device, marked=False, backend=backend)
    values = captured.on_device(inputs, device)
    return lambda: whole.run(values)


class _Bench:
    """The model as one stretch and as several, and their times so far."""

    def __init__(
        self,
        captured: Captured,
        inputs: Sequence[Tensor],
        device: torch.device,
        loss: Loss | None,
        ways: Sequence[Way] = (None,),
    ) -> None:
        self.captured, self.device, self.loss = captured, device, loss
        self.ways, self.way = ways, ways[0]
        self.compared: list[CompiledWay] = []
        self.refused: str | None = None
        self.groups: Sequence[ProfiledGroups] = ()
        self.eager: Collection[str] = ()
        self.inputs = captured.on_device(inputs, device)
        self.nodes = captured.working
        self.watch = stopwatch(device)
        self.whole = self._stretch(self.nodes, marked=True)
        self.read_shares = _shares(captured, self.nodes, lambda parameter: True)
        self.learned_shares = _shares(
            captured, self.nodes, lambda parameter: parameter.requires_grad
        )
        self.turns: list[BothPasses] = []
        self.passes: list[TimedPass] = []
        self.recomputed: list[NodeSeconds] = []
        self.divisions: dict[Way, list[Division]] = {}
        self.compiled_in: dict[Way, float] = {None: 0.0}

    @property
    def every(self) -> list[Division]:
        return [division for own in self.divisions.values() for division in own]

    def _stretch(self, nodes: Sequence[str], marked: bool, way: Way = None) -> Stretch:
        return Stretch(self.captured, nodes, self.watch, self.device, marked, way, self.eager)

    def _by_node(self, turn: Turn) -> tuple[NodeSeconds, NodeSeconds]:
        """Times by node; the time of the call is divided by the number of parameters."""
        passes = (turn.forward, self.read_shares), (turn.backward, self.learned_shares)
        forward, backward = (
            {
                name: passed.nodes.get(name, 0.0) + passed.call * share.get(name, 0.0)
                for name in (*self.nodes, LOSS)
            }
            for passed, share in passes
        )
        return forward, backward

    def warm_up(self) -> float:
        """Runs one pass; returns its seconds."""
        turn = self.whole.run(self.inputs, self.loss)
        forward, backward = self._by_node(turn)
        self.seconds = {name: forward[name] + backward[name] for name in self.nodes}
        return turn.forward.seconds + turn.backward.seconds

    def divide(self) -> None:
        """Divides the nodes into stretches by their times in the warm-up, for each way."""
        self.divisions = {}
        for way in self.ways:
            if way is None:
                self.divisions[None] = self._divided(_DIVISIONS)
            else:
                self._compile(way)

    def _compile(self, way: str) -> None:
        """Adds a way, but for groups none of which is faster compiled. Raises CannotCompile if it
        is the only one, and cannot be had.
        """
        try:
            if way.startswith(BY_GROUPS) and not self._try_groups(way) and len(self.ways) > 1:
                return
            self.divisions[way] = self._made(way)
        except (CannotCompile, TorchDynamoException) as error:
            self.refused = next(iter(str(error).strip().splitlines()), type(error).__name__)
            if len(self.ways) == 1:
                raise CannotCompile(self.refused) from error

    def _try_groups(self, way: str) -> bool:
        """Finds out which groups to compile; tells whether there are any."""
        trial = GroupTrial(self.device, self.watch, self.captured.module_paths)
        given = self.captured, self.nodes, self.watch, self.device
        tried = Stretch(*given, marked=False, backend=way, trial=trial)
        tried.run(self.inputs)
        self.groups = list(trial.tried.values())
        self.eager = {node for own in self.groups if not own.compiled for node in own.nodes}
        return any(own.compiled for own in self.groups)

    def _made(self, way: str) -> list[Division]:
        """Compiles stretches by running them. Raises CannotCompile if gradients are wrong."""
        divisions = self._divided(_COMPILED_DIVISIONS, way)
        began = time.perf_counter()
        self._run(divisions[-1])
        took = time.perf_counter() - began
        if way.startswith(BY_GROUPS):  # they were compiled before
            took = sum(own.compile_seconds or 0.0 for own in self._own_groups)
        self.compiled_in[way] = took
        for division in (*divisions[:-1], *divisions * _FURTHER_RUNS):
            self._run(division)
        whole = self._stretch(self.nodes, marked=False)
        wrong = wrong_gradient(whole, divisions[-1][0].stretch, self.inputs)
        if wrong is not None:
            raise CannotCompile(f"{way} computes another gradient of {wrong}")
        return divisions

    def _run(self, division: Division) -> None:
        for _ in run(division, self.inputs, self.loss):
            pass

    def _divided(self, counts: Sequence[int], way: Way = None) -> list[Division]:
        ends = [] if self.loss is None else [LOSS]
        found: list[Division] = []
        for number in counts:
            division = stretches(self.captured.graph, self.nodes, self.seconds, number)
            names = [*division[:-1], [*division[-1], *ends]]
            made = [self._stretch(nodes, False, way) for nodes in division]
            found.append(list(map(TimedStretch, division, names, made)))
        return found

    def repeat(self, number: int) -> float:
        """Runs the whole model, then its stretches; returns the seconds of the whole model."""
        turn = self.whole.run(self.inputs, self.loss)
        both = self._by_node(turn)
        self.turns.append(both)
        seconds = turn.forward.seconds + turn.backward.seconds
        self.passes.append(TimedPass.ended(time.monotonic(), seconds))
        if number % _RECOMPUTED == 0:
            with torch.no_grad():
                recomputed = self.whole.run(self.inputs, self.loss)
            self.recomputed.append(self._by_node(recomputed)[0])
        division = self.every[number % len(self.every)]
        for timed, alone in run(division, self.inputs, self.loss):
            timed.alone.append((number, alone.forward.seconds, alone.backward.seconds))
        return seconds

    def _saved_parts(self) -> dict[str, float]:
        """Returns by node what is saved, in parts of what it is eagerly; empty if not compiled."""
        if self.way is None:
            return {}
        divisions = self.divisions[self.way]
        ((_, *large),) = self._saved(divisions[-1])
        return saved_parts(self._saved(divisions[0]), (large[0], large[1]))

    def _saved(self, division: Division) -> list[tuple[TimedStretch, int, int]]:
        """Returns for each stretch the bytes that it saves eagerly, and compiled."""
        known, found = dict(self.inputs), []
        for timed, turn in run(division, self.inputs, self.loss):
            known |= turn.values
            eager = self._stretch(timed.nodes, marked=False)
            found.append((timed, eager.saved_bytes(known), timed.stretch.saved_bytes(known)))
        return found

    @property
    def _own_groups(self) -> Sequence[ProfiledGroups]:
        """Those that are compiled."""
        return [own for own in self.groups if own.compiled]

    def _decide(self) -> None:
        """Takes the way that is fastest."""
        wholes = {way: own[-1] for way, own in self.divisions.items()}
        seconds = seconds_of(wholes, self.turns)
        self.way = fastest(seconds)
        self.compared = [self._compared(way, own) for way, own in seconds.items()]

    def _compared(self, way: Way, seconds: float) -> CompiledWay:
        by_groups = way is not None and way.startswith(BY_GROUPS)
        return CompiledWay(
            compile=way,
            seconds=seconds,
            compile_seconds=self.compiled_in[way],
            groups=sum(own.groups for own in self._own_groups) if by_groups else 1,
            forms=len(self._own_groups) if by_groups else 1,
        )

    def times(self, repeats: Repeats) -> Times:
        if len(self.divisions) > 1:
            self._decide()
        if self.way is not None:
            self._take_gains()
        every = self.divisions[self.way]
        measured = [each for division in every for each in division if each.alone]
        compared = [each.compared(self.turns) for each in measured]
        forward = fit_stretches([own for own, _ in compared])
        backward = fit_stretches([own for _, own in compared])
        forwards, backwards = (_scaled_to_median(each) for each in zip(*self.turns, strict=True))
        recomputed = _scaled_to_median(self.recomputed)

        def timing(name: str) -> Timing:
            return Timing(
                _spread([seconds[name] for seconds in forwards], forward.factor),
                _spread([seconds[name] for seconds in backwards], backward.factor),
                _spread([seconds[name] for seconds in recomputed], forward.factor),
            )

        nodes = {name: timing(name) for name in self.nodes}
        of_input = Timing.nothing()
        return Times(
            {name: nodes.get(name, of_input) for name in self.captured.graph.nodes},
            len(repeats.warming),
            len(repeats.noted),
            timing(LOSS) if self.loss is not None else None,
            [each.profiled(*own) for each, own in zip(measured, compared, strict=True)],
            forward,
            backward,
            self.passes[: len(repeats.noted)],
            self._saved_parts(),
            self.way,
            self.compared,
            self.refused,
            self.groups,
        )

    def _take_gains(self) -> None:
        """Gives nodes, and the loss, the part of their times that their compiled stretch takes."""
        parts = gains(self.divisions[self.way][0], self.turns)
        self.turns = [(taking(one, parts, 0), taking(two, parts, 1)) for one, two in self.turns]
        self.recomputed = [taking(each, parts, 0) for each in self.recomputed]


def _shares(
    captured: Captured, nodes: Sequence[str], counts: Callable[[nn.Parameter], bool]
) -> Mapping[str, float]:
    """Returns the share of each node in the parameters that count, by number of reads."""
    parameter = captured.module.get_parameter
    reads = {n: sum(counts(parameter(p)) for p in captured.parameters[n]) for n in nodes}
    return {name: count / (sum(reads.values()) or 1) for name, count in reads.items()}


def _scaled_to_median(passes: Sequence[NodeSeconds]) -> Sequence[NodeSeconds]:
    """Scales the times of each pass to the median pass, and so that the medians add up to it.

    Removes what slows a whole pass down. Disturbances that hit another node in every pass are in no
    median; the second scaling distributes them over all nodes.
    """
    totals = [sum(seconds.values()) for seconds in passes]
    middle = statistics.median(totals)
    if not all(totals):
        return passes
    shares = [
        {name: spent / total for name, spent in seconds.items()}
        for seconds, total in zip(passes, totals, strict=True)
    ]
    known = sum(statistics.median(share[name] for share in shares) for name in shares[0])
    return [{name: middle / known * part for name, part in share.items()} for share in shares]


def _spread(seconds: Sequence[float], factor: float) -> Quartiles:
    return Quartiles.of([factor * each for each in seconds])
