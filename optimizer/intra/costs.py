"""The operators of a graph as a problem: labels and what they take in seconds and bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import numpy as np

from pipedream.graph.errors import UserError
from pipedream.graph.placements.operators import (
    Operator,
    OperatorCall,
    OperatorGraph,
    StageInput,
    StageOutput,
    TensorType,
)
from pipedream.graph.placements.placement import Partial, Placements, Replicate, show_placements
from pipedream.graph.placements.requests import Requests, requested_operators, requested_values
from pipedream.optimizer.intra.labels import JointStrategy, Labels, OperatorLabels, Places
from pipedream.optimizer.intra.solver.problem import Floats, Ints, Problem, Value
from pipedream.sharding.assignment import (
    Assignment,
    LinkedMesh,
    inner_sums,
    output_target,
    redistributions,
)
from pipedream.sharding.distances import Distances, distances
from pipedream.sharding.local_times import LocalTimes
from pipedream.sharding.steps import MeshTensor, elements_held


@dataclass(frozen=True)
class Accounting:
    """What counts besides operators and redistributions.

    `minibatches`: of an update, on one worker, which share the sums of gradients;
    `parameter_seconds`: per minibatch and byte of a parameter that a device holds, such as for the
    all-reduce of replicas; `parameter_copies`: bytes for each byte of a parameter (gradient, state,
    versions); `activation_copies`: minibatches in flight. `limit`: bytes of a device.
    """

    minibatches: float = 1.0
    parameter_seconds: float = 0.0
    parameter_copies: float = 1.0
    activation_copies: float = 1.0
    limit: float | None = None


@dataclass(frozen=True, eq=False)
class StageProblem:
    """`seconds`: of calls on one device, by name; `backward`: the calls of the backward pass;
    `kept`: bytes that are kept for the backward pass, for each byte of a value that a call of the
    forward pass gives and the backward pass reads, by the name of the call.
    """

    graph: OperatorGraph
    mesh: LinkedMesh
    seconds: Mapping[str, float]
    backward: Set[str]
    accounting: Accounting = Accounting()
    requests: Requests = field(default_factory=Requests)
    kept: Mapping[str, float] = field(default_factory=dict)
    times: LocalTimes = field(default_factory=LocalTimes)
    _tables: dict[object, tuple[Value, object]] = field(default_factory=dict, init=False)
    _shares: dict[object, tuple[Floats, Floats]] = field(default_factory=dict, init=False)
    _ends: dict[object, list[tuple[range, Value]]] = field(default_factory=dict, init=False)

    @cached_property
    def problem(self) -> Problem:
        """Variables: what the graph is given, its calls, and at the end its outputs."""
        calls = [self._call_costs(call) for call in self.graph.calls]
        inputs = [self._input_costs(each) for each in self.graph.inputs]
        ends = [(np.zeros(1), np.zeros(1)) for _ in self.graph.outputs]
        seconds, held = zip(*inputs, *calls, *ends, strict=True)
        values = [*self._values(), *self._gradients()]
        return Problem(seconds, held, values, self.accounting.limit, self._kinds)

    def assignment(self, labels: Ints) -> Assignment:
        """The strategies of these labels of the problem."""
        placed: dict[str, Placements] = {}
        for given, label in zip(self.graph.inputs, labels, strict=False):
            placed[given.value] = self._inputs[given.value].distinct[label]
        chosen: dict[str, JointStrategy] = {}
        for call, label in zip(self.graph.calls, labels[len(placed) :], strict=False):
            own = self._labels[call.name]
            chosen[call.name] = own.strategies[label]
            for value, places in zip(call.results, own.outputs, strict=True):
                if value is not None:
                    placed[value] = places.distinct[places.number[label]]
        return Assignment(self.graph, self.mesh, chosen, placed)

    def seconds_of(self, assignment: Assignment) -> float:
        """What any assignment of the graph takes, as the problem counts."""
        sizes, accounting = self.mesh.sizes, self.accounting
        work = sum(
            self.seconds.get(call.name, 0.0)
            * self.times.share(call.operator, assignment.strategies[call.name], sizes)
            for call in self.graph.calls
        )
        moved = sum(
            each.seconds / (accounting.minibatches if each.often == "update" else 1.0)
            for each in redistributions(assignment)
        )
        parameters = (each for each in self.graph.inputs if each.role == "parameter")
        held = sum(
            float(self._held_bytes(each.type, [assignment.placed[each.value]])[0])
            for each in parameters
        )
        return work + moved + accounting.parameter_seconds * held

    @property
    def _kinds(self) -> tuple[Hashable, ...]:
        """Of the variables: for equal operators, or parameters, with equal labels the same."""
        operators: dict[Operator, int] = {}
        inputs = [("given", e.role, id(self._inputs[e.value])) for e in self.graph.inputs]
        calls = [
            (operators.setdefault(each.operator, len(operators)), id(self._labels[each.name]))
            for each in self.graph.calls
        ]
        return (*inputs, *calls, *("end" for _ in self.graph.outputs))

    @cached_property
    def types(self) -> dict[str, TensorType]:
        return self.graph.types()

    @cached_property
    def _requested(self) -> tuple[dict[str, Placements], dict[str, tuple[Placements, ...]]]:
        """What the user wants, of values and of what operators read. Raises UserError."""
        sizes = self.mesh.sizes
        return (
            requested_values(self.graph, sizes, self.requests),
            requested_operators(self.graph, sizes, self.requests),
        )

    @cached_property
    def _maker(self) -> Labels:
        values, operators = self._requested
        groups = [*values.values(), *(each for own in operators.values() for each in own)]
        return Labels(self.graph, self.mesh.sizes, (each for group in groups for each in group))

    @cached_property
    def _inputs(self) -> dict[str, Places]:
        """The placements of what is given, by value."""
        values = self._requested[0]
        known: dict[object, Places] = {}  # one object for all layers, which then share tables
        found = {}
        for each in self.graph.inputs:
            key = values.get(each.value, (each.role, each.type))
            if key not in known:
                wanted = values.get(each.value)
                known[key] = Places.of(self._maker.of_input(each) if wanted is None else (wanted,))
            found[each.value] = known[key]
        return found

    @cached_property
    def _labels(self) -> dict[str, OperatorLabels]:
        """By the name of a call; those that requests leave. Raises UserError."""
        values, operators = self._requested
        found = {}
        for call in self.graph.calls:
            own = self._maker.of_call(call.operator)
            if call.name in operators:
                own = self._left(
                    call, own, own.inputs, operators[call.name], "operators." + call.name
                )
            for number, value in enumerate(call.results):
                if value in values:
                    places, wanted = own.outputs[number : number + 1], (values[value],)
                    own = self._left(call, own, places, wanted, f"values.{value}")
            found[call.name] = own
        return found

    def _left(
        self,
        call: OperatorCall,
        own: OperatorLabels,
        places: Sequence[Places],
        wanted: Sequence[Placements],
        where: str,
    ) -> OperatorLabels:
        """The labels that place these tensors as wanted. Raises UserError if there are none."""
        kept = np.ones(len(own.strategies), dtype=np.bool_)
        for each, placements in zip(places, wanted, strict=True):
            alike = np.array([other == placements for other in each.distinct])
            kept &= alike[each.number]
        if not kept.any():
            shown = " ".join(map(show_placements, wanted))
            raise UserError(
                f"{where}: {call.operator.target} cannot be divided so that it has {shown}: choose"
                " another placement"
            )
        return own.only(kept.tolist())

    @cached_property
    def _number(self) -> dict[str, int]:
        """The variable of each call and of each value that is given, by name."""
        names = [*(each.value for each in self.graph.inputs), *(c.name for c in self.graph.calls)]
        return {name: number for number, name in enumerate(names)}

    @cached_property
    def _written(self) -> frozenset[str]:
        """What operators must find as it is, above all what they change."""
        return frozenset(call.reads[n] for call in self.graph.calls for n in call.operator.stays)

    @cached_property
    def _sources(self) -> dict[str, tuple[int, Places]]:
        """By value the variable that gives it, and how its labels place it."""
        sources = {
            each.value: (self._number[each.value], self._inputs[each.value])
            for each in self.graph.inputs
        }
        for call in self.graph.calls:
            for value, places in zip(call.results, self._labels[call.name].outputs, strict=True):
                if value is not None:
                    sources[value] = self._number[call.name], places
        return sources

    def _input_costs(self, given: StageInput) -> tuple[Floats, Floats]:
        distinct = self._inputs[given.value].distinct
        if given.role != "parameter":
            return np.zeros(len(distinct)), np.zeros(len(distinct))
        held = self._held_bytes(given.type, distinct)
        accounting = self.accounting
        return accounting.parameter_seconds * held, accounting.parameter_copies * held

    def _call_costs(self, call: OperatorCall) -> tuple[Floats, Floats]:
        """Work, and sums in the middle of the operator."""
        own = self._labels[call.name]
        key = call.operator, id(own)
        if key not in self._shares:
            sizes = self.mesh.sizes
            shares = [self.times.share(call.operator, joint, sizes) for joint in own.strategies]
            inner = [inner_sums(call, joint, self.mesh) for joint in own.strategies]
            moved = [sum(each.seconds for each in sums) for sums in inner]
            self._shares[key] = np.array(shares), np.array(moved)
        shares_, moved_ = self._shares[key]
        return self.seconds.get(call.name, 0.0) * shares_ + moved_, np.zeros(len(shares_))

    def _values(self) -> Iterable[Value]:
        """What is read, and what leaves the graph whole at its end."""
        readers: dict[str, list[tuple[int, list[Places], bool]]] = defaultdict(list)
        for call in self.graph.calls:
            by_value: dict[str, list[Places]] = defaultdict(list)
            for value, places in zip(call.reads, self._labels[call.name].inputs, strict=True):
                by_value[value].append(places)
            for value, forms in by_value.items():
                number = self._number[call.name]
                readers[value].append((number, forms, call.name in self.backward))
        first_end = len(self._number)
        for number, output in enumerate(self.graph.outputs):
            if output.role == "output":
                readers[output.value].append((first_end + number, [self._whole], False))
        for value, own in readers.items():
            yield self._value(value, own)

    @cached_property
    def _whole(self) -> Places:
        return Places.of([(Replicate(),) * len(self.mesh.sizes)])

    def _value(self, value: str, readers: Sequence[tuple[int, list[Places], bool]]) -> Value:
        """Values that are alike, in equal layers, share their tables."""
        source, places = self._sources[value]
        type_, weight = self.types[value], self._kept_weight(value)
        key = (
            *(type_.shape, type_.element_bytes, id(places), value in self._written, weight),
            *((tuple(map(id, own)), when) for _, own, when in readers),
        )
        if key not in self._tables:
            made = self._tabled(value, places, readers)
            self._tables[key] = made, [own for _, own, _ in readers]
        numbers = tuple(number for number, _, _ in readers)
        return replace(self._tables[key][0], source=source, readers=numbers)

    def _tabled(
        self, value: str, places: Places, readers: Sequence[tuple[int, list[Places], bool]]
    ) -> Value:
        type_ = self.types[value]
        forms: dict[tuple[Placements, ...], int] = {}
        wanted = tuple(_forms(own, forms) for _, own, _ in readers)
        single = tuple(dict.fromkeys(each for form in forms for each in form))
        moved = self._distances(type_).seconds(places.distinct, single)
        if value in self._written:
            moved = np.where(moved > 0, np.inf, moved)
            moved += np.where(_differ(places.distinct, single), np.inf, 0.0)
        column = {each: k for k, each in enumerate(single)}
        seconds = np.stack(
            [moved[:, [column[each] for each in form]].sum(axis=1) for form in forms], axis=1
        )
        weight = self._kept_weight(value)
        held = [weight * self._held_bytes(type_, form).sum() for form in forms]
        same = [forms.get((each,), -1) for each in places.distinct]
        return Value(
            0,
            places.number,
            tuple(range(1, 1 + len(readers))),
            wanted,
            seconds,
            tuple(when for _, _, when in readers),
            weight * self._held_bytes(type_, places.distinct),
            np.array(held),
            np.array(same, dtype=np.intp),
        )

    def _kept_weight(self, value: str) -> float:
        return self.accounting.activation_copies * self.kept.get(self._maker_of.get(value, ""), 0.0)

    @cached_property
    def _maker_of(self) -> dict[str, str]:
        """The call of the forward pass that gives a value."""
        return {
            value: call.name
            for call in self.graph.calls
            if call.name not in self.backward
            for value in call.results
            if value is not None
        }

    def _gradients(self) -> Iterable[Value]:
        """Gradients of inputs and parameters, which go to the places of these."""
        primals = {(str(each.role), each.name): each.value for each in self.graph.inputs}
        ends: dict[str, dict[str, StageOutput]] = defaultdict(dict)
        for output in self.graph.outputs:
            if output.role != "output":
                primal = primals[output.role.removesuffix(" gradient"), output.name]
                if self._sources[output.value][0] != self._number[primal]:
                    ends[output.value][primal] = output
        for value, own in ends.items():
            source, places = self._sources[value]
            numbers = [self._number[primal] for primal in own]
            targets = [self._inputs[primal] for primal in own]
            type_ = self.types[value]
            roles = (each.role for each in own.values())
            key = (
                type_.shape,
                type_.element_bytes,
                id(places),
                *zip(roles, map(id, targets), strict=True),
            )
            if key not in self._ends:
                self._ends[key] = self._gradient_values(places, list(own.values()), targets)
            for readers, made in self._ends[key]:
                yield replace(made, source=source, readers=tuple(numbers[k] for k in readers))

    def _gradient_values(
        self, places: Places, outputs: Sequence[StageOutput], targets: Sequence[Places]
    ) -> list[tuple[range, Value]]:
        """Of one value, which may be the gradient of several, as of both biases of an LSTM: it is
        brought to a placement once, but added up for each of them. With which of them each is for.
        """
        pairs = list(zip(outputs, targets, strict=True))
        tables = [self._gradient_table(output, places, target) for output, target in pairs]
        if len(pairs) == 1:
            ((now, later),) = tables
            return [(range(1), _moved(places, [targets[0].number], now + later))]
        found = [
            (range(k, k + 1), _moved(places, [targets[k].number], later))
            for k, (_, later) in enumerate(tables)
        ]
        kinds = [(output.role, id(target)) for output, target in pairs]
        by_kind = {kind: now for kind, (now, _) in zip(kinds, tables, strict=True)}
        widths = (now.shape[1] for now in by_kind.values())
        first = dict(zip(by_kind, accumulate(widths, initial=0), strict=False))
        wanted = [first[kind] + each.number for kind, each in zip(kinds, targets, strict=True)]
        at_once = _moved(places, wanted, np.hstack(list(by_kind.values())))
        return [*found, (range(len(pairs)), at_once)]

    def _gradient_table(
        self, output: StageOutput, places: Places, target: Places
    ) -> tuple[Floats, Floats]:
        """Seconds in each minibatch, and its share of those of each update, where the gradient is
        given and what it is of is placed so. That of a parameter stays partial where the parameter
        is whole, to be added up once for each update.
        """
        known = self._distances(self.types[output.value])
        role = output.role.removesuffix(" gradient")
        number: dict[Placements, int] = {}
        by_sums: dict[tuple[bool, ...], list[int]] = {}  # all that it depends on
        at_once = []
        for each in places.distinct:
            sums = tuple(own == Partial() for own in each)
            if sums not in by_sums:
                ends = (
                    output_target(output, each, {(role, output.name): own})
                    for own in target.distinct
                )
                by_sums[sums] = [number.setdefault(end, len(number)) for end in ends]
            at_once.append(by_sums[sums])
        now = known.seconds(places.distinct, tuple(number))
        later = known.seconds(tuple(number), target.distinct) / self.accounting.minibatches
        rows, columns = np.ogrid[: len(places.distinct), : len(target.distinct)]
        return now[rows, at_once], later[at_once, columns]

    def _distances(self, type_: TensorType) -> Distances:
        mesh = self.mesh
        return distances(MeshTensor(type_.shape, type_.element_bytes, mesh.sizes, mesh.links))

    def _held_bytes(self, type_: TensorType, forms: Sequence[Placements]) -> Floats:
        held = [elements_held(type_.shape, self.mesh.sizes, each) for each in forms]
        return np.array(held, dtype=np.float64) * type_.element_bytes


def _moved(places: Places, wanted: Sequence[Ints], seconds: Floats) -> Value:
    """A value of which nothing is kept."""
    given, targets = map(np.zeros, seconds.shape)
    same = np.full(len(given), -1)
    readers, backward = tuple(range(1, 1 + len(wanted))), (True,) * len(wanted)
    return Value(0, places.number, readers, tuple(wanted), seconds, backward, given, targets, same)


def _forms(own: Sequence[Places], forms: dict[tuple[Placements, ...], int]) -> Ints:
    """The number of what each label wants of a value that it may read several times."""
    if len(own) == 1:
        numbers = [forms.setdefault((each,), len(forms)) for each in own[0].distinct]
        return np.array(numbers, dtype=np.intp)[own[0].number]
    labels = zip(*(each.number for each in own), strict=True)
    distinct = (
        tuple(dict.fromkeys(each.distinct[k] for each, k in zip(own, label, strict=True)))
        for label in labels
    )
    return np.array([forms.setdefault(each, len(forms)) for each in distinct], dtype=np.intp)


def _differ(sources: Sequence[Placements], targets: Sequence[Placements]) -> Floats:
    return np.array([[source != target for target in targets] for source in sources])
