"""Times each node in passes of the whole model, and fits them to passes of stretches.

One repeat is a pass of the whole model with a mark at each node, then a pass of the same nodes in
two, four or one stretch without marks, as stages run. The sums over nodes are fitted to the times
of the stretches of the same repeat, so that a slow moment of the machine affects both.

Compiled stages have no nodes that could be timed. Then the stretches are compiled, as stages will
be, and each of the smallest says for its nodes what part of their times it takes. To find out
whether that is faster, both are measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TypeAlias

import torch
from torch import Tensor, nn

from pipedream.capture.captured import Captured
from pipedream.capture.node_modules import preserve_model_state
from pipedream.graph.profile import CompiledPasses, Passes, ProfiledStretch, Quartiles
from pipedream.profiler.timing.passes import LOSS, Loss, Stretch, Turn
from pipedream.profiler.timing.stopping_rule import Repeats, StoppingRule, no_garbage_collection
from pipedream.profiler.timing.stopwatch import stopwatch
from pipedream.profiler.timing.stretches import Compared, fit_stretches, stretches
from pipedream.profiler.timing.times import Times, Timing

NodeSeconds: TypeAlias = Mapping[str, float]
"""Seconds of each node and of the loss."""

_Turn: TypeAlias = tuple[NodeSeconds, NodeSeconds]
"""Forward and backward."""

_DIVISIONS = (2, 4, 1)
_COMPILED_DIVISIONS = (6, 1)
"""As each stretch takes a while to compile; the first says what each part of a model gains."""
_WORTH_COMPILING = 0.99
"""Of the seconds of passes that are not compiled: else stages stay as they are."""
_FIRST_RUNS = 3
"""Of a stretch that is compiled: in these it is."""
_RECOMPUTED = 3
"""Every this many repeats, the forward pass runs once more without saving for a backward pass."""


def time_in_training(
    captured: Captured,
    inputs: Sequence[Tensor],
    stopping_rule: StoppingRule,
    device: torch.device,
    loss: Loss | None = None,
    progress: Callable[[float], None] = lambda part: None,
    backend: str | None = None,
    choose: bool = False,
) -> Times:
    """Times the nodes of `captured` in passes on `inputs` (in the order of `captured.inputs`).

    The backward pass starts at `loss`, or at random gradients of the outputs without one.
    `progress` is called with the fraction done, from 0 to 1. `backend`: of torch.compile, if stages
    will be compiled; with `choose` only if that is faster. Buffers are restored.
    """
    with preserve_model_state(captured), no_garbage_collection(), torch.enable_grad():
        bench = _Bench(captured, inputs, device, loss, backend, choose)
        repeats = Repeats(stopping_rule)
        while repeats.warm(bench.warm_up()):
            pass
        if backend is not None:  # which takes a while
            progress(0.0)
        bench.divide()
        for number in count():
            more = repeats.go_on(bench.repeat(number))
            progress(repeats.part)
            if not more:
                break
        for further in range(number + 1, len(bench.divisions) if choose else 0):
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


@dataclass(frozen=True)
class _TimedStretch:
    """A stretch of nodes; `names`: these, and the loss if it ends in that; `alone`: the number of
    each repeat, and the seconds of its passes without marks.
    """

    nodes: Sequence[str]
    names: Sequence[str]
    stretch: Stretch
    alone: list[tuple[int, float, float]] = field(default_factory=list)

    def compared(self, turns: Sequence[_Turn]) -> tuple[Compared, Compared]:
        """Both passes beside the sums over its nodes in `turns`, by repeat: the medians."""
        forward, backward = (
            Compared.median(
                [
                    Compared(sum(turns[k][which][n] for n in self.names), own[which])
                    for k, *own in self.alone
                ]
            )
            for which in (0, 1)
        )
        return forward, backward

    def profiled(self, forward: Compared, backward: Compared) -> ProfiledStretch:
        return ProfiledStretch(
            first=self.nodes[0],
            last=self.nodes[-1],
            nodes=len(self.nodes),
            forward=Passes(summed=forward.summed, measured=forward.measured),
            backward=Passes(summed=backward.summed, measured=backward.measured),
        )


class _Bench:
    """The model as one stretch and as several, and their times so far."""

    def __init__(
        self,
        captured: Captured,
        inputs: Sequence[Tensor],
        device: torch.device,
        loss: Loss | None,
        backend: str | None = None,
        choose: bool = False,
    ) -> None:
        self.captured, self.device, self.loss = captured, device, loss
        self.backend, self.choose = backend, choose
        self.compared: CompiledPasses | None = None
        self.inputs = captured.on_device(inputs, device)
        self.nodes = captured.working
        self.watch = stopwatch(device)
        self.whole = self._stretch(self.nodes, marked=True)
        self.read_shares = _shares(captured, self.nodes, lambda parameter: True)
        self.learned_shares = _shares(
            captured, self.nodes, lambda parameter: parameter.requires_grad
        )
        self.turns: list[_Turn] = []
        self.recomputed: list[NodeSeconds] = []
        self.divisions: list[list[_TimedStretch]] = []
        self.plain = 0

    def _stretch(self, nodes: Sequence[str], marked: bool, backend: str | None = None) -> Stretch:
        return Stretch(self.captured, nodes, self.watch, self.device, marked, backend)

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
        """Divides the nodes into stretches by their times in the warm-up."""
        self.divisions = []
        if self.backend is None or self.choose:
            self.divisions += self._divided(_DIVISIONS)
        self.plain = len(self.divisions)
        if self.backend is not None:
            self.divisions += self._divided(_COMPILED_DIVISIONS, self.backend)
        for division in self.divisions[self.plain :] * _FIRST_RUNS:
            for _timed, _turn in self._run(division):
                pass

    def _divided(
        self, counts: Sequence[int], backend: str | None = None
    ) -> list[list[_TimedStretch]]:
        ends = [] if self.loss is None else [LOSS]
        found = []
        for number in counts:
            division = stretches(self.captured.graph, self.nodes, self.seconds, number)
            names = [*division[:-1], [*division[-1], *ends]]
            made = [self._stretch(nodes, False, backend) for nodes in division]
            found.append(list(map(_TimedStretch, division, names, made)))
        return found

    def repeat(self, number: int) -> float:
        """Runs the whole model, then its stretches; returns the seconds of the whole model."""
        turn = self.whole.run(self.inputs, self.loss)
        both = self._by_node(turn)
        self.turns.append(both)
        if number % _RECOMPUTED == 0:
            with torch.no_grad():
                recomputed = self.whole.run(self.inputs, self.loss)
            self.recomputed.append(self._by_node(recomputed)[0])
        division = self.divisions[number % len(self.divisions)]
        for timed, alone in self._run(division):
            timed.alone.append((number, alone.forward.seconds, alone.backward.seconds))
        return turn.forward.seconds + turn.backward.seconds

    def _saved_parts(self) -> dict[str, float]:
        """Returns by node what its compiled stretch saves, in parts of what it saves eagerly; all
        together what the whole model does.
        """
        if self.backend is None:
            return {}
        first = self._saved(self.divisions[0])
        small, large = (
            sum(after for _, after in own) / (sum(before for before, _ in own) or 1)
            for own in (first, self._saved(self.divisions[-1]))
        )
        parts: dict[str, float] = {}
        for timed, (before, after) in zip(self.divisions[0], first, strict=True):
            own = after / before if before else 1.0
            parts |= dict.fromkeys(timed.nodes, own * large / small if small else own)
        return parts

    def _saved(self, division: Sequence[_TimedStretch]) -> list[tuple[int, int]]:
        """Returns for each stretch the bytes that it saves eagerly, and compiled."""
        known, found = dict(self.inputs), []
        for timed, turn in self._run(division):
            known |= turn.values
            eager = Stretch(self.captured, timed.nodes, self.watch, self.device, marked=False)
            found.append((eager.saved_bytes(known), timed.stretch.saved_bytes(known)))
        return found

    def _run(self, division: Sequence[_TimedStretch]) -> Iterator[tuple[_TimedStretch, Turn]]:
        """Runs one stretch after the other on what those before it gave."""
        values = dict(self.inputs)
        for timed in division:
            alone = timed.stretch.run(values, self.loss if LOSS in timed.names else None)
            values.update(alone.values)
            yield timed, alone

    def _decide(self) -> None:
        """Leaves the stretches that are faster, compiled or not."""
        plain, made = self.divisions[: self.plain], self.divisions[self.plain :]
        eager, compiled = (
            sum(own.measured for each in division for own in each.compared(self.turns))
            for division in (plain[-1], made[-1])
        )
        self.compared = CompiledPasses(eager_seconds=eager, compiled_seconds=compiled)
        if compiled < eager * _WORTH_COMPILING:
            self.divisions = made
        else:
            self.divisions, self.backend = plain, None

    def times(self, repeats: Repeats) -> Times:
        if self.choose:
            self._decide()
        if self.backend is not None:
            self._take_gains()
        measured = [each for division in self.divisions for each in division if each.alone]
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
            repeats.noted,
            self._saved_parts(),
            self.backend,
            self.compared,
        )

    def _take_gains(self) -> None:
        """Gives nodes, and the loss, the part of their times that their compiled stretch takes."""
        gains = dict.fromkeys((*self.nodes, LOSS), (1.0, 1.0))
        for timed in self.divisions[0]:
            if timed.alone:
                forward, backward = timed.compared(self.turns)
                gains |= dict.fromkeys(timed.names, (_part(forward), _part(backward)))
        self.turns = [
            (_gaining(forward, gains, 0), _gaining(backward, gains, 1))
            for forward, backward in self.turns
        ]
        self.recomputed = [_gaining(each, gains, 0) for each in self.recomputed]


def _part(compared: Compared) -> float:
    return compared.measured / compared.summed if compared.summed > 0 else 1.0


def _gaining(
    seconds: NodeSeconds, gains: Mapping[str, tuple[float, float]], which: int
) -> NodeSeconds:
    return {name: own * gains[name][which] for name, own in seconds.items()}


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
