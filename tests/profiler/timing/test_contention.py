"""Other processes at work: at passes of the model, then at the operator that is timed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass, field

import pytest
import torch

from pipedream.graph.placements.operators import Input, Operator, TensorType
from pipedream.profiler.timing import operator_times
from pipedream.profiler.timing.contention import Contention, TimedPass, contend
from pipedream.profiler.timing.operator_times import tasks_on, time_alone

CPU = torch.device("cpu")


def test_a_process_does_passes_until_it_is_told_tasks_and_ends_with_the_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told, tell = os.pipe()
    done: list[str] = []

    def passes() -> None:
        done.append("passes")
        if len(done) == 3:
            os.write(tell, b"one\n\n\nother\n\npasses\n")
        if len(done) == 8:
            os.write(tell, b"one\n\n")
            os.close(tell)

    with os.fdopen(told) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        contend(passes, lambda task: lambda: done.append(task))
    assert done == [*["passes"] * 3, "one", "one", "other", "passes", "passes", "one"]
    assert capsys.readouterr().out == "ready\n" * 5


def test_a_process_tells_what_its_passes_took_in_the_meantime(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told, tell = os.pipe()
    clock = iter([10.0, 12.0, 12.0, 16.0])
    done: list[str] = []

    def passes() -> None:
        done.append("passes")
        if len(done) == 3:
            os.write(tell, b"times\n")
            os.close(tell)

    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with os.fdopen(told) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        contend(passes, lambda task: print)
    ready, answer = capsys.readouterr().out.splitlines()
    assert (ready, answer) == ("ready", "[[11.0, 2.0], [14.0, 4.0]]")

    script = f"input(); print({answer!r})"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as other:
        own = [TimedPass(middle, 1.0) for middle in (9.0, 11.0, 12.5, 20.0)]
        assert Contention([other]).beside(own) == ((2.0, 2.0, 3.0, 4.0),)
    assert Contention().beside(own) == ()


@dataclass(frozen=True)
class Recorded(Contention):
    said: list[str] = field(default_factory=list)

    def begin(self, task: str) -> None:
        self.said.append(task)

    def go(self) -> None:
        self.said.append("go")

    def end(self) -> None:
        self.said.append("end")


def test_others_do_each_operator_as_often_and_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Devices of a mesh were timed as if the others did something else: two that stream through
    memory at the same time have half of it each, and VGG-11 on two took 15 % longer than planned.
    """
    executed: list[Operator] = []
    others = Recorded()

    def execute(operator: Operator, _inputs: object) -> None:
        assert others.said[-1] == "go"
        executed.append(operator)

    monkeypatch.setattr(operator_times, "execute", execute)
    operators = [product(4), product(2)]
    time_alone(operators, CPU, enough=0.01, at_once=others)
    assert others.said.count("go") == len(executed) >= 4

    monkeypatch.setattr(operator_times, "execute", lambda operator, _: executed.append(operator))
    timed = list(dict.fromkeys(executed))
    executed.clear()
    assert others.said.index("end") == len(others.said) - 1
    for task in (said for said in others.said if said not in ("go", "end")):
        tasks_on(CPU)(task)()
    assert executed == timed == operators


def test_a_process_goes_on_where_an_operator_cannot_be_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(operator_times, "execute", fails)
    others = Recorded()
    assert time_alone([product(2)], CPU, enough=0.01, at_once=others) == {product(2): None}
    tasks_on(CPU)(others.said[0])()


def product(rows: int) -> Operator:
    arguments = Input(input=0), Input(input=1)
    return Operator(
        target="aten.mm.default",
        arguments=arguments,
        inputs=(floats(rows, 3), floats(3, 5)),
        outputs=(floats(rows, 5),),
    )


def floats(*shape: int) -> TensorType:
    return TensorType(shape=shape, dtype="float32", element_bytes=4)
