"""Where the time of a minibatch is, beside where the plan expects it, and what is off."""

from __future__ import annotations

from collections.abc import Sequence

from pipedream.graph.plan import Predicted, StageSeconds
from pipedream.graph.units import show_seconds
from pipedream.runtime.report.stage_seconds import StagesMeasured

_MOST_STAGES = 16
"""Rows of the table."""

_OWN_TIME = {"compute": "computes for", "exchange": "exchanges gradients and messages for"}


def where_time_is(predicted: Predicted | None, measured: StagesMeasured) -> list[str]:
    """Returns a table of the stages, expected times in parentheses, and what is off; `predicted`:
    by the plan, None if the run is another.
    """
    expected = None if predicted is None else predicted.expected_stages
    rows: list[tuple[str, ...]] = [("stage", "compute", "waiting", "exchange")]
    for number, stage in enumerate(measured.stages[:_MOST_STAGES]):
        planned = None if expected is None else expected[number]
        rows.append(
            (
                str(number),
                *(_beside(stage, planned, each) for each in ("compute", "waiting", "exchange")),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    left_out = len(measured.stages) - _MOST_STAGES
    if left_out > 0:
        lines.append(f"  and {left_out} more stages")
    return [*lines, *what_is_off(predicted, measured)]


def _beside(measured: StageSeconds, planned: StageSeconds | None, name: str) -> str:
    seconds = show_seconds(getattr(measured, name))
    return seconds if planned is None else f"{seconds} ({show_seconds(getattr(planned, name))})"


def what_is_off(predicted: Predicted | None, measured: StagesMeasured) -> list[str]:
    """Returns a line on what explains most of the difference; none if the run is as expected, or
    nothing is known of what its stages were to do.

    A stage that waits is not the reason while another computes or exchanges longer: waiting comes
    last, and is then that for one stage in particular.
    """
    expected = None if predicted is None else predicted.expected_stages
    if predicted is None or expected is None or predicted.expects(measured.seconds):
        return []
    change = measured.seconds - predicted.seconds_in_a_run
    slower = 1 if change > 0 else -1

    def most(name: str) -> tuple[float, int]:
        pairs = enumerate(zip(measured.stages, expected, strict=True))
        changes = ((getattr(now, name) - getattr(then, name), n) for n, (now, then) in pairs)
        return max((slower * seconds, stage) for seconds, stage in changes)

    for name, words in _OWN_TIME.items():
        off, stage = most(name)
        if off >= abs(change) / 2:
            times = _both(measured, expected, stage, name)
            return [f"{_off(slower)}: stage {stage} {words} {times}"]
    return [f"{_off(slower)}: {_waiting(measured, expected, most('waiting')[1])}"]


def _off(slower: int) -> str:
    return "slower than expected" if slower > 0 else "faster than expected"


def _both(measured: StagesMeasured, expected: Sequence[StageSeconds], stage: int, name: str) -> str:
    now, then = (getattr(each[stage], name) for each in (measured.stages, expected))
    return f"{show_seconds(now)} in place of {show_seconds(then)}"


def _waiting(measured: StagesMeasured, expected: Sequence[StageSeconds], stage: int) -> str:
    text = f"stage {stage} waits for {_both(measured, expected, stage, 'waiting')}"
    waits = {other: s for (waiting, other), s in measured.waits.items() if waiting == stage}
    if not waits:
        return f"{text}, and no stage computes longer"
    other = max(waits, key=waits.__getitem__)
    return (
        f"{text}, most of it for stage {other}: the link between them, or passes that vary from one"
        " to the next"
    )
