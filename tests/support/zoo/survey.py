"""Takes a module of the zoo through all ways of training it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping

from pipedream.capture.captured import Captured
from pipedream.graph.errors import UserError
from zoo.learned import SMALLER, Learned, evaluated, plain
from zoo.loops import by_pipeline
from zoo.piped import Pipelined, Way, captured_for
from zoo.specimens import Specimen
from zoo.verdict import Verdict, judge

PIPELINE = Way()
"""A loop of the user's own; the others are by the engine alone."""

TRAINING: Mapping[str, Way] = {
    "whole": Way(),
    "2 stages": Way(2),
    "3 stages": Way(3),
    "whole, halves": Way(halves=True),
    "2 stages, halves": Way(2, halves=True),
    "3 stages, halves": Way(3, halves=True),
    "recompute": Way(3, recompute=True),
    "halves, recompute": Way(3, halves=True, recompute=True),
    "smaller": Way(2, sizes=SMALLER),
    "compiled": Way(2, backend="aot_eager"),
    "halves, compiled": Way(2, halves=True, backend="aot_eager"),
    "groups": Way(backend="groups:aot_eager"),
    "Pipeline": PIPELINE,
}
EVALUATION: Mapping[str, Way] = {"eval": Way(), "eval, 3 stages": Way(3)}


def survey(specimen: Specimen, *only: str) -> dict[str, Verdict]:
    """By the name of each way [default: all], or `capture`, what has come of it."""
    with specimen.precision(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = dict(_trained(specimen, only))
        return found | dict(_evaluated(specimen, only))


def _trained(specimen: Specimen, only: tuple[str, ...]) -> Iterator[tuple[str, Verdict]]:
    ways = {name: way for name, way in TRAINING.items() if not only or name in only}
    if not ways:
        return
    try:
        expected = plain(specimen)
    except (RuntimeError, ValueError) as error:
        yield "plain", Verdict("refused", f"PyTorch itself: {str(error).splitlines()[0]}")
        return
    captured, refusal = _captured(specimen, training=True)
    if captured is None:
        yield "capture", refusal
        return
    for name, way in ways.items():
        reference = _reference(specimen, way, captured, expected)
        if reference is not None and way.stages <= len(captured.working):
            yield name, judge(reference, _run(specimen, way, captured), specimen.dtype)


def _reference(
    specimen: Specimen, way: Way, captured: Captured, expected: Learned
) -> Learned | None:
    """What is to be learned in this way: what a loop learns, or of draws what the whole module
    does; None where a loop fails, such as with a batch norm of one example.
    """
    if specimen.random:
        return Pipelined(specimen, Way(sizes=way.sizes), captured).train()
    if way.sizes is not SMALLER:
        return expected
    try:
        return plain(specimen, SMALLER)
    except (RuntimeError, ValueError):
        return None


def _run(specimen: Specimen, way: Way, captured: Captured) -> Callable[[], Learned]:
    if way is PIPELINE:
        return lambda: by_pipeline(specimen, captured)
    return lambda: Pipelined(specimen, way, captured).train()


def _evaluated(specimen: Specimen, only: tuple[str, ...]) -> Iterator[tuple[str, Verdict]]:
    ways = {name: way for name, way in EVALUATION.items() if not only or name in only}
    if not ways:
        return
    captured, refusal = _captured(specimen, training=False)
    if captured is None:
        yield "capture, eval", refusal
        return
    expected = evaluated(specimen)
    for name, way in ways.items():
        if way.stages > len(captured.working):
            continue
        if specimen.random:
            expected = Pipelined(specimen, Way(), captured, training=False).evaluate()

        def run(way: Way = way) -> Learned:
            return Pipelined(specimen, way, captured, training=False).evaluate()

        yield name, judge(expected, run, specimen.dtype)


def _captured(specimen: Specimen, training: bool) -> tuple[Captured | None, Verdict]:
    """The module, or why it is refused."""
    try:
        return captured_for(specimen, training), Verdict("equal")
    except UserError as error:
        line = error.format_message()
        return None, Verdict("refused" if "\n" not in line else "WRONG", line)
    except Exception as error:  # what no user should see
        reason = (str(error).strip() or "no message").splitlines()[0]
        return None, Verdict("WRONG", f"capture ends in {type(error).__name__}: {reason}")
