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
from collections.abc import Callable, Mapping, Sequence
from itertools import count

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException

from pipedream.capture.captured import Captured
from pipedream.capture.node_modules import preserve_model_state
from pipedream.graph.profile import CompiledPasses, Quartiles
from pipedream.profiler.timing.passes import LOSS, Loss, Stretch, Turn
from pipedream.profiler.timing.stopping_rule import Repeats, StoppingRule, no_garbage_collection
from pipedream.profiler.timing.stopwatch import stopwatch
from pipedream.profiler.timing.stretches import fit_stretches, stretches
from pipedream.profiler.timing.timed_stretch import (
    BothPasses,
    Division,
    NodeSeconds,
    TimedStretch,
    both_ways,
    gains,
    is_worth_it,
    run,
    saved_parts,
    taking,
    wrong_gradient,
)
from pipedream.profiler.timing.times import Times, Timing

_DIVISIONS = (2, 4, 1)
_COMPILED_DIVISIONS = (6, 1)
"""As each stretch takes a while to compile; the first says what each part of a model gains."""
_FIRST_RUNS = 3
"""Of a stretch that is compiled: in these it is."""
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
    backend: str | None = None,
    choose: bool = False,
) -> Times:
    """Times the nodes of `captured` in passes on `inputs` (in the order of `captured.inputs`).

    The backward pass starts at `loss`, or at random gradients of the outputs without one.
    `progress` is called with the fraction done, from 0 to 1. `backend`: of torch.compile, if stages
    will be compiled; with `choose` only if that is faster. Buffers are restored. Raises
    CannotCompile, without `choose`, also if compiled passes compute other gradients.
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
        self.refused: str | None = None
        self.inputs = captured.on_device(inputs, device)
        self.nodes = captured.working
        self.watch = stopwatch(device)
        self.whole = self._stretch(self.nodes, marked=True)
        self.read_shares = _shares(captured, self.nodes, lambda parameter: True)
        self.learned_shares = _shares(
            captured, self.nodes, lambda parameter: parameter.requires_grad
        )
        self.turns: list[BothPasses] = []
        self.recomputed: list[NodeSeconds] = []
        self.divisions: list[Division] = []
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
            try:
                self._compile()
            except (CannotCompile, TorchDynamoException) as error:
                self.refused = next(iter(str(error).strip().splitlines()), type(error).__name__)
                if not self.choose:
                    raise CannotCompile(self.refused) from error
                del self.divisions[self.plain :]

    def _compile(self) -> None:
        """Compiles the stretches by running them. Raises CannotCompile if gradients are wrong."""
        for division in self.divisions[self.plain :] * _FIRST_RUNS:
            for _timed, _turn in run(division, self.inputs, self.loss):
                pass
        whole = self._stretch(self.nodes, marked=False)
        wrong = wrong_gradient(whole, self.divisions[-1][0].stretch, self.inputs)
        if wrong is not None:
            raise CannotCompile(f"{self.backend} computes another gradient of {wrong}")

    def _divided(self, counts: Sequence[int], backend: str | None = None) -> list[Division]:
        ends = [] if self.loss is None else [LOSS]
        found: list[Division] = []
        for number in counts:
            division = stretches(self.captured.graph, self.nodes, self.seconds, number)
            names = [*division[:-1], [*division[-1], *ends]]
            made = [self._stretch(nodes, False, backend) for nodes in division]
            found.append(list(map(TimedStretch, division, names, made)))
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
        for timed, alone in run(division, self.inputs, self.loss):
            timed.alone.append((number, alone.forward.seconds, alone.backward.seconds))
        return turn.forward.seconds + turn.backward.seconds

    def _saved_parts(self) -> dict[str, float]:
        """Returns by node what is saved, in parts of what it is eagerly; empty if not compiled."""
        if self.backend is None:
            return {}
        small = self._saved(self.divisions[0])
        ((_, *large),) = self._saved(self.divisions[-1])
        return saved_parts(small, (large[0], large[1]))

    def _saved(self, division: Division) -> list[tuple[TimedStretch, int, int]]:
        """Returns for each stretch the bytes that it saves eagerly, and compiled."""
        known, found = dict(self.inputs), []
        for timed, turn in run(division, self.inputs, self.loss):
            known |= turn.values
            eager = self._stretch(timed.nodes, marked=False)
            found.append((timed, eager.saved_bytes(known), timed.stretch.saved_bytes(known)))
        return found

    def _decide(self) -> None:
        """Leaves the stretches that are faster, compiled or not."""
        plain, made = self.divisions[: self.plain], self.divisions[self.plain :]
        if made:
            self.compared = both_ways(plain[-1], made[-1], self.turns)
        if self.compared is not None and is_worth_it(self.compared):
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
            self.refused,
        )

    def _take_gains(self) -> None:
        """Gives nodes, and the loss, the part of their times that their compiled stretch takes."""
        parts = gains(self.divisions[0], self.turns)
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
