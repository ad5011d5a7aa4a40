"""Would a schedule end on GPUs? Streams, queues and hosts of all ranks, as CUDA and NCCL have them.

The host of a rank goes through its actions: it puts passes on the compute stream and operations on
the stream of their communicator, which first waits for what the compute stream has by then; the
compute stream waits for what a pass needs. An operation ends when all its ranks have come to it on
their streams. Who begins the first on a communicator waits for the others on the host.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field

from pipedream.schedule.action import PASSES, RECEIVES, Action, Kind
from pipedream.schedule.channel import Use
from pipedream.schedule.operations import Operation, RankOperations

COMPUTE = "compute"


@dataclass(frozen=True)
class Gpu:
    """`streams`: for communicators, dealt out in turn; `queues`: in hardware, to which streams are;
    what cannot go on at the head of one stops what is behind it. None: as many as are wanted.
    `used_first`: whether each communicator is used when it is made, in one order on all ranks;
    `done_first`: whether each kind of pass was done before, else the first waits for the device.
    """

    streams: int | None = None
    queues: int | None = None
    used_first: bool = True
    done_first: bool = True


@dataclass(eq=False)
class Item:
    """On a stream: a pass, an operation, or what waits for the end of another item."""

    operation: Operation | None = None
    after: Item | None = None
    done: bool = False


@dataclass
class Host:
    """A rank. `program`: what is left to do, as functions that say whether they could."""

    gpu: Gpu
    communicators: list[Hashable]
    program: deque[tuple[str, object]]
    streams: dict[object, deque[Item]] = field(default_factory=lambda: defaultdict(deque))
    queues: dict[object, deque[tuple[object, Item]]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    last: dict[object, Item] = field(default_factory=dict)
    begun: dict[Operation, Item] = field(default_factory=dict)

    def put(self, stream: object, item: Item) -> Item:
        number = 0 if stream == COMPUTE else 1 + int(str(stream))
        queue = number if self.gpu.queues is None else number % self.gpu.queues
        self.streams[stream].append(item)
        self.queues[queue].append((stream, item))
        self.last[stream] = item
        return item

    def stream_of(self, operation: Operation) -> int:
        number = self.communicators.index(operation.communicator)
        return number if self.gpu.streams is None else number % self.gpu.streams

    @property
    def idle(self) -> bool:
        return not any(self.streams.values())


def hangs(ranks: Mapping[int, RankOperations], gpu: Gpu) -> dict[int, str]:
    """What each rank that does not come to its end was about to do."""
    hosts = {rank: _host(operations, gpu) for rank, operations in ranks.items()}
    arrived, running = defaultdict(set), defaultdict(set)
    moved = True
    while moved:
        moved = False
        for rank, host in hosts.items():
            while host.program and _goes_on(rank, host, arrived):
                host.program.popleft()
                moved = True
            moved |= _device(rank, host, running)
    return {
        rank: str(host.program[0] if host.program else "its device")
        for rank, host in hosts.items()
        if host.program or not host.idle
    }


def _host(operations: RankOperations, gpu: Gpu) -> Host:
    listed = list(_program(operations, gpu))
    used = {op.communicator: op for what, op in listed if what == "begin"}  # type: ignore[union-attr]
    ordered = sorted(used, key=repr)
    first = [("use", used[each]) for each in ordered] if gpu.used_first else []
    return Host(gpu, ordered, deque([*first, *listed]))


def _program(operations: RankOperations, gpu: Gpu) -> Iterator[tuple[str, object]]:
    seen, newest = set[tuple[int, Kind]](), dict[Hashable, Operation]()
    for action, begun in operations:
        for operation in begun:
            newest[_name(operation)] = operation
            if operation.communicator.receivers:
                yield "begin", operation
        if action.kind in PASSES or action.kind is Kind.UPDATE:
            if not gpu.done_first and (action.stage, action.kind) not in seen:
                yield "device", None
            seen.add((action.stage, action.kind))
            yield "pass", str(action)
        yield from (("begin", each) for each in begun if not each.communicator.receivers)
        yield from (("wait", newest[key]) for key in _awaited(action) if key in newest)
        if action.kind is Kind.NORM and any(each.communicator.use is Use.NORMS for each in begun):
            yield "synchronize", None  # the host looks at it


def _name(operation: Operation) -> Hashable:
    """A message's own, that of a sum for all rounds."""
    communicator, what = operation
    return what if communicator.receivers else (communicator.use, what[1])


def _awaited(action: Action) -> list[Hashable]:
    """What the compute stream waits for at an action, if it is not of this rank alone."""
    if action.kind is Kind.ALL_REDUCE:
        return [(Use.SUMS, (action.stage,) * 2), (Use.TIED_SUMS, (-1, -1))]
    if action.kind is Kind.NORM:
        return [(Use.NORMS, (-1, -1))]
    if action.kind not in RECEIVES:
        return []
    assert action.peer is not None
    back = action.kind is Kind.RECV_GRADIENT
    kind = Kind.SEND_GRADIENT if back else Kind.SEND_ACTIVATION
    link = min(action.stage, action.peer[0]), max(action.stage, action.peer[0])
    return [(kind, link, action.minibatch)]


def _goes_on(rank: int, host: Host, arrived: dict[Hashable, set[int]]) -> bool:
    what, operation = host.program[0]
    if what == "device":
        return host.idle
    if what == "synchronize":
        return not host.streams[COMPUTE]
    if what == "pass":
        host.put(COMPUTE, Item())
        return True
    assert isinstance(operation, Operation)
    if what == "wait":
        host.put(COMPUTE, Item(after=host.begun[operation]))
        return True
    arrived[operation.communicator].add(rank)
    if not arrived[operation.communicator] >= set(operation.communicator.members):
        return False
    if what == "begin":
        stream = host.stream_of(operation)
        if COMPUTE in host.last:
            host.put(stream, Item(after=host.last[COMPUTE]))
        host.begun[operation] = host.put(stream, Item(operation))
    return True


def _device(rank: int, host: Host, running: dict[Operation, set[int]]) -> bool:
    moved = False
    for queue in host.queues.values():
        while queue:
            stream, item = queue[0]
            if host.streams[stream][0] is not item or (item.after and not item.after.done):
                break
            queue.popleft()
            moved = True
            if item.operation is not None:
                running[item.operation].add(rank)
            else:
                item.done = True
                host.streams[stream].popleft()
    for items in host.streams.values():
        if items and items[0].operation is not None:
            operation = items[0].operation
            if rank in running[operation] and running[operation] >= set(
                operation.communicator.members
            ):
                items.popleft().done = moved = True
    return moved
