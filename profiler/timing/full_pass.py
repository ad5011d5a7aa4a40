"""Times each node in passes of the whole model, and fits them to passes of stretches.

One repeat is a pass of the whole model with a mark at each node, then a pass of the same nodes in
two, four or one stretch without marks, as stages run. The sums over nodes are fitted to the times
of the stretches of the same repeat, so that a slow moment of the machine affects both.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TypeAlias

import torch
from torch import Tensor, nn

from pipedream.capture.captured import Captured
from pipedream.capture.node_modules import preserve_model_state
from pipedream.graph.profile import Passes, ProfiledStretch, Quartiles
from pipedream.profiler.timing.passes import LOSS, Loss, Stretch, Turn
from pipedream.profiler.timing.stopping_rule import Repeats, StoppingRule, no_garbage_collection
from pipedream.profiler.timing.stopwatch import stopwatch
from pipedream.profiler.timing.stretches import Compared, fit_stretches, stretches
from pipedream.profiler.timing.times import Times, Timing

NodeSeconds: TypeAlias = Mapping[str, float]
"""Seconds of each node and of the loss."""

_DIVISIONS = (2, 4, 1)
_RECOMPUTED = 3
"""Every this many repeats, the forward pass runs once more without saving for a backward pass."""


def time_in_training(
    captured: Captured,
    inputs: Sequence[Tensor],
    stopping_rule: StoppingRule,
    device: torch.device,
    loss: Loss | None = None,
    progress: Callable[[float], None] = lambda part: None,
) -> Times:
    """Times the nodes of `captured` in passes on `inputs` (in the order of `captured.inputs`).

    The backward pass starts at `loss`, or at random gradients of the outputs without one.
    `progress` is called with the fraction done, from 0 to 1. Buffers are restored.
    """
    with preserve_model_state(captured), no_garbage_collection(), torch.enable_grad():
        bench = _Bench(captured, inputs, device, loss)
        repeats = Repeats(stopping_rule)
        while repeats.warm(bench.warm_up()):
            pass
        bench.divide()
        for number in count():
            more = repeats.go_on(bench.repeat(number))
            progress(repeats.part)
            if not more:
                break
    return bench.times(repeats)


def passes(
    captured: Captured, inputs: Sequence[Tensor], device: torch.device
) -> Callable[[], object]:
    """Returns a function that runs the whole model forward and backward, without timing."""
    whole = Stretch(captured, captured.working, stopwatch(device), device, marked=False)
    values = captured.on_device(inputs, device)
    return lambda: whole.run(values)


@dataclass(frozen=True)
class _TimedStretch:
    """A stretch of nodes, with forward and backward comparisons of each repeat."""

    nodes: Sequence[str]
    stretch: Stretch
    compared: list[tuple[Compared, Compared]] = field(default_factory=list)

    @property
    def medians(self) -> tuple[Compared, Compared]:
        forward, backward = zip(*self.compared, strict=True)
        return Compared.median(forward), Compared.median(backward)

    @property
    def profiled(self) -> ProfiledStretch:
        forward, backward = (
            Passes(summed=each.summed, measured=each.measured) for each in self.medians
        )
        return ProfiledStretch(
            first=self.nodes[0],
            last=self.nodes[-1],
            nodes=len(self.nodes),
            forward=forward,
            backward=backward,
        )


class _Bench:
    """The model as one stretch and as several, and their times so far."""

    def __init__(
        self, captured: Captured, inputs: Sequence[Tensor], device: torch.device, loss: Loss | None
    ) -> None:
        self.captured, self.device, self.loss = captured, device, loss
        self.inputs = captured.on_device(inputs, device)
        self.nodes = captured.working
        self.watch = stopwatch(device)
        self.whole = self._stretch(self.nodes, marked=True)
        self.read_shares = _shares(captured, self.nodes, lambda parameter: True)
        self.learned_shares = _shares(
            captured, self.nodes, lambda parameter: parameter.requires_grad
        )
        self.turns: list[tuple[NodeSeconds, NodeSeconds]] = []
        self.recomputed: list[NodeSeconds] = []
        self.divisions: list[list[_TimedStretch]] = []

    def _stretch(self, nodes: Sequence[str], marked: bool) -> Stretch:
        return Stretch(self.captured, nodes, self.watch, self.device, marked)

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
        self.divisions = [
            [
                _TimedStretch(nodes, self._stretch(nodes, marked=False))
                for nodes in stretches(self.captured.graph, self.nodes, self.seconds, count)
            ]
            for count in _DIVISIONS
        ]

    def repeat(self, number: int) -> float:
        """Runs the whole model, then its stretches; returns the seconds of the whole model."""
        turn = self.whole.run(self.inputs, self.loss)
        both = self._by_node(turn)
        self.turns.append(both)
        if number % _RECOMPUTED == 0:
            with torch.no_grad():
                recomputed = self.whole.run(self.inputs, self.loss)
            self.recomputed.append(self._by_node(recomputed)[0])
        values = dict(self.inputs)
        division = self.divisions[number % len(self.divisions)]
        for timed in division:
            loss = self.loss if timed is division[-1] else None
            alone = timed.stretch.run(values, loss)
            values.update(alone.values)
            names = [*timed.nodes, *([LOSS] if loss else [])]
            forward, backward = (sum(seconds[n] for n in names) for seconds in both)
            compared = Compared(forward, alone.forward.seconds)
            timed.compared.append((compared, Compared(backward, alone.backward.seconds)))
        return turn.forward.seconds + turn.backward.seconds

    def times(self, repeats: Repeats) -> Times:
        measured = [each for division in self.divisions for each in division if each.compared]
        forward = fit_stretches([each.medians[0] for each in measured])
        backward = fit_stretches([each.medians[1] for each in measured])
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
            [each.profiled for each in measured],
            forward,
            backward,
            repeats.noted,
        )


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
