"""Checkpoints of a simulated run, from which it goes on bit for bit.

A coroutine cannot be written to a file, but at the top of its loop all that it needs is in its state (`node.mark`), and
from there on it is deterministic given what it receives. So a checkpoint holds each rank's state at its last mark,
what it has received since, and what is on its way. To resume, every rank starts at its mark and hears again what it
heard, at the same instants; what it sends, records and pays for until the moment of the checkpoint is thrown away,
since the checkpoint has it already. At most one round of each worker is computed twice.

Source: Elnozahy et al., "A survey of rollback-recovery protocols in message-passing systems", ACM Computing Surveys
2002 (pessimistic message logging), and Chandy and Lamport, "Distributed snapshots", ACM TOCS 1985.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Any

from ashl.learn.device import HOST
from ashl.runtime.channel import Channel, Collective, Shared
from ashl.runtime.kernel import Task
from ashl.runtime.node import Deaf, Node
from ashl.runtime.packed import packed, unpacked

if TYPE_CHECKING:
    from ashl.runtime.keeping import Restored
    from ashl.runtime.sim import Sim

KEPT = ("steps", "staleness", "loss", "measures")  # of a node, beside its ledger
MESSAGE, HEAD, RESULT, TURN = "message", "head", "result", "turn"  # what may be on its way
OF_A_CANCELLED_TASK = -1
BEFORE = -(2**40)  # the places of what comes before all else at the instant of a mark


@dataclass
class Mark:
    """One rank since the top of its loop: where it stood, what it has received, the places in the order of events that
    its doings took, how many collectives it has posted, and which of them have begun."""

    time_ns: int
    stage: int
    state: Any
    mail: list[Any]
    drawn: int
    own: Any = None  # what its module keeps beside the parameters
    came: list[tuple[int, int, str, Any]] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    posted: int = 0
    begun: list[int] = field(default_factory=list)
    first: int = 0  # the last place taken before the mark
    unit_free: int = 0  # when its compute unit has done what it was asked before the mark


class Saving:
    """Runs the simulation on, with every rank's doings written down, until all have been at the top of their loops."""

    def __init__(self, sim: Sim) -> None:
        self.sim = sim
        self.marks: dict[int, Mark] = {}
        self._results: dict[int, tuple[int, int]] = {}  # by place: of which rank's collective, and which of them
        self._shared_places: set[int] = set()  # those that no rank takes by itself
        self._numbers: dict[Task, int] = {}  # which of its rank's collectives a task waits for
        self._asked = {  # who had asked for what is computed alike, before its mark
            (channel.team, key): set(shared.asked)
            for channel in sim.channels.all()
            for key, shared in channel.shared.items()
        }

    def until_consistent(self) -> bool:
        """False where the run ended first, or some rank cannot be saved."""
        sim, heap = self.sim, self.sim._heap
        sim.saving, sim._post, sim._begin = self, self.post, self.begin  # type: ignore[method-assign]
        try:
            while heap and len(self.marks) < len(sim.nodes):
                time_ns, place, target, value = heappop(heap)
                sim.now_ns = time_ns
                sim.events += 1
                rank, before = self.owner(target, value), sim._seq
                mark = self.marks.get(rank)
                if mark is not None and (what := self.received(place, target, value)):
                    mark.came.append((time_ns, place, *what))
                if target.__class__ is not Task:
                    target(value)
                elif not target.done:
                    sim._resume(target, value)
                if mark := self.marks.get(rank):
                    taken = range(max(before, mark.first) + 1, sim._seq + 1)
                    mark.places += [p for p in taken if p not in self._shared_places]
                self.cut = (time_ns, place)
                if any(task.done for task in sim._mains):
                    return False
            return len(self.marks) == len(sim.nodes)
        finally:
            sim.saving = None
            del sim._post, sim._begin  # type: ignore[method-assign]

    def mark(self, node: Node, stage: int, state: Any) -> None:
        """This rank is at the top of its loop; without a state it cannot be saved before it is there again."""
        sim = self.sim
        if state is None:
            self.marks.clear()  # nor the others: they are on their way to the same end
            self._numbers.clear()
            return
        if any(task.node is node and not (task.main or task.stands) for task in sim._tasks):
            return  # what runs beside it has no top of a loop
        if any(node.rank in posted.arrived for posted in sim.channels.waiting()):
            return  # nor has a collective that a cancelled task has left behind
        mail = sim._mail[node.rank].kept()
        self.marks[node.rank] = Mark(
            time_ns=sim.now_ns,
            stage=stage,
            state=packed(state),
            mail=packed(mail),
            drawn=sim.speed.drawn(node.rank),
            own=packed(node.own_state),
            first=sim._seq,
            unit_free=sim._unit_free[node.rank],
        )

    def asked(self, node: Node, channel: Channel, key: Hashable) -> None:
        """A rank asks for what its team computes alike. Once it has a mark, it will ask again."""
        if node.rank not in self.marks:
            asked = self._asked.setdefault((channel.team, key), set())
            asked.add(node.rank)
            if len(asked) == len(channel.team):
                del self._asked[channel.team, key]

    def post(self, task: Task, effect: Collective) -> None:
        sim, before = self.sim, self.sim._seq
        if mark := self.marks.get(task.node.rank):
            self._numbers[task] = mark.posted
            mark.posted += 1
        type(sim)._post(sim, task, effect)
        self._shared_places.update(range(before + 1, sim._seq + 1))

    def begin(self, channel: Channel) -> None:
        sim, before = self.sim, self.sim._seq
        waiting = {number: posted.arrived for number, posted in channel.pending.items()}
        type(sim)._begin(sim, channel)
        (begun,) = waiting.keys() - channel.pending.keys()
        for rank, place in zip(channel.team, range(before + 1, sim._seq + 1), strict=True):
            number = self._numbers.pop(waiting[begun][rank][0], OF_A_CANCELLED_TASK)
            self._results[place] = rank, number
            if number != OF_A_CANCELLED_TASK:
                self.marks[rank].begun.append(number)

    def owner(self, target: Any, value: Any) -> int:
        """The rank that an event happens to; -1 where it happens in the network."""
        if isinstance(target, Task):
            return target.node.rank
        name = target.__name__
        return (
            -1 if name in ("_arrive", "_serve", "_settle") else value[0] if name == "_deliver" else value[0].node.rank
        )

    def received(self, place: int, target: Any, value: Any) -> tuple[str, Any] | None:
        """What came from outside with this event; all else a rank does again by itself."""
        if place in self._results:
            return RESULT, packed((*self._results[place], value))
        name = "" if isinstance(target, Task) else target.__name__
        if name == "_serve":
            return TURN, packed(value.team)
        return (MESSAGE, packed(value)) if name == "_deliver" else (HEAD, packed(value)) if name == "_arrive" else None

    def document(self) -> dict[str, Any]:
        """All that the simulation needs to go on."""
        sim = self.sim
        under_way = [(time_ns, place, self.received(place, *what)) for time_ns, place, *what in sorted(sim._heap)]
        return {
            "time_ns": sim.now_ns,
            "cut": self.cut,
            "seq": sim._seq,
            "events": sim.events,
            "marks": [vars(self.marks[rank]) for rank in range(len(sim.nodes))],
            "under_way": [(time_ns, place, *what) for time_ns, place, what in under_way if what],
            "nodes": packed([counted(node) for node in sim.nodes]),
            "push_end": list(sim._push_end),
            "ports": packed(sim.network.saved()),
            "channels": packed({channel.team: channel.free_ns for channel in sim.channels.all()}),
            "asked": packed(self._asked),
        }


def resume(sim: Sim, start: Callable[..., Coroutine], saved: Mapping[str, Any]) -> None:
    """Bring a fresh simulation to where the checkpoint was made. `start(node, saved=(stage, state))` is a rank's
    coroutine; `saved["packages"]` says whose classes a state may be of."""
    restored = partial(unpacked, packages=tuple(saved["packages"]), device=saved.get("device", HOST))
    marks = [Mark(**mark) for mark in saved["marks"]]
    replay = Replay(sim, marks)
    for team, free_ns in restored(saved["channels"]).items():
        sim.channels.of(team, 0).free_ns = free_ns
    for (team, key), asked in restored(saved["asked"]).items():
        sim.channels.of(team, 0).shared.setdefault(key, Shared()).asked.update(asked)
    heap, cut = sim._heap, tuple(saved["cut"])
    for rank, mark in enumerate(marks):
        node = sim.nodes[rank]
        if sim.worker_states is not None:
            sim.worker_states.set_worker_state(rank, restored(mark.own))
        task = Task(node, start(node, saved=(mark.stage, restored(mark.state))), main=True)
        sim._mains.append(task)
        sim._tasks.add(task)
        sim.speed.draw_from(rank, mark.drawn)
        sim._unit_free[rank] = mark.unit_free
        for message in restored(mark.mail):
            sim._mail[rank].put(message)
        heap.append((mark.time_ns, rank - len(marks), task, None))
    came = [event for mark in marks for event in mark.came]
    for time_ns, place, what, value in (*came, *(tuple(event) for event in saved["under_way"])):
        heap.append((time_ns, place, *replay.event(what, restored(value))))
    heap.sort()  # a sorted list is a heap
    replay.until(cut)
    sim.now_ns, sim._seq, sim.events = saved["time_ns"], saved["seq"], saved["events"]
    sim._push_end[:] = saved["push_end"]
    sim.network.go_on(restored(saved["ports"]))
    for node, known in zip(sim.nodes, restored(saved["nodes"]), strict=True):
        put_back(node, known)


def go_on(sim: Sim, start: Callable[..., Coroutine], ranks: Sequence[Restored], time_ns: int) -> None:
    """Bring a fresh simulation to this moment, with what each rank kept where nothing was on its way."""
    sim.now_ns = time_ns
    for node, known in zip(sim.nodes, ranks, strict=True):
        put_back(node, known.node)
        if sim.worker_states is not None:
            sim.worker_states.set_worker_state(node.rank, known.own)
        node.ledger.mark("wait", time_ns)
        sim.speed.draw_from(node.rank, known.drawn)
        sim._mains.append(sim.spawn(node, start(node, saved=(known.stage, known.state)), main=True))


class Replay:
    """Until the moment of the checkpoint: events take the places they had, and nothing leaves a rank."""

    def __init__(self, sim: Sim, marks: list[Mark]) -> None:
        self.sim = sim
        self.places = [deque(mark.places) for mark in marks]
        self.begun = [set(mark.begun) for mark in marks]
        self.posted = [0] * len(marks)
        self.tasks: dict[tuple[int, int], Task] = {}  # who waits for a rank's n-th collective since its mark
        self.marked: set[int] = set()  # who is at its mark, or past it
        self.before = count(BEFORE)

    def event(self, what: str, value: Any) -> tuple[Any, Any]:
        """(target, value) of something that comes from outside."""
        if what == TURN:
            channel = self.sim.channels.of(value, 0)
            channel.waking = True
            return self.sim._serve, channel
        return {MESSAGE: self.sim._deliver, HEAD: self.sim._arrive, RESULT: self.result}[what], value

    def until(self, cut: tuple[int, int]) -> None:
        sim, heap = self.sim, self.sim._heap
        # records and snapshots were taken the first time; what the ranks see of the monitor is what it says now: they
        # ask right after they have sent it something, so it has not changed since
        observer, sim.observer = sim.observer, Deaf(sim.observer.stopping, sim.observer.scores)
        sim._at, sim._send, sim._post = self.at, self.send, self.post  # type: ignore[method-assign]
        sim.mark = self.mark  # type: ignore[method-assign]
        try:
            while heap and heap[0][:2] <= cut:
                sim.now_ns, _, target, value = heappop(heap)
                if target.__class__ is not Task:
                    target(value)
                elif not target.done:
                    sim._resume(target, value)
        finally:
            del sim._at, sim._send, sim._post, sim.mark  # type: ignore[method-assign]
            sim.observer = observer
        for i, (time_ns, place, target, value) in enumerate(heap):
            if target == self.result and value[:2] in self.tasks:
                heap[i] = (time_ns, place, self.tasks[value[:2]], value[2])

    def mark(self, node: Node, stage: int, state: Any) -> bool:
        self.marked.add(node.rank)
        return False

    def at(self, time_ns: int, target: Any, value: Any) -> None:
        rank = (target if isinstance(target, Task) else value[0]).node.rank
        place = self.places[rank].popleft() if rank in self.marked else next(self.before)  # what stands beside it
        heappush(self.sim._heap, (time_ns, place, target, value))

    def send(self, node: Node, send: Any) -> None:
        """It has been sent: it has arrived, or is under way."""
        self.places[node.rank].popleft()

    def post(self, task: Task, effect: Collective) -> None:
        rank = task.node.rank
        number = self.posted[rank]
        self.posted[rank] += 1
        if number in self.begun[rank]:
            self.tasks[rank, number] = task  # its result is among what came, or under way
        else:
            type(self.sim)._post(self.sim, task, effect)

    def result(self, item: tuple[int, int, Any]) -> None:
        """What a collective gave to the rank that had posted it."""
        rank, number, value = item
        if number != OF_A_CANCELLED_TASK and not (task := self.tasks[rank, number]).done:
            self.sim._resume(task, value)


def counted(node: Node) -> dict[str, Any]:
    """What a node has counted."""
    ledger = {name: getattr(node.ledger, name) for name in node.ledger.__slots__}
    return {"ledger": ledger} | {name: getattr(node, name) for name in KEPT}


def put_back(node: Node, known: dict[str, Any]) -> None:
    """A fresh node goes on with it."""
    for name, value in known["ledger"].items():
        setattr(node.ledger, name, value)
    for name in KEPT:
        setattr(node, name, known[name])
