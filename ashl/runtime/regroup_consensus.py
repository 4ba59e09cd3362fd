"""Agree on the members of a process group after a failure or a join, and make a gloo group for
them.

The controller says which workers have failed; the group decides when to take that into account.
Every member writes its request into the job's store, under the number of the decision. The first
member that sees all requests, or learns of a failed member, writes the decision, and the first
decision written holds for all. After a failure the survivors ask again, under the next number. So
all members see the same decisions in the same order, though they learn of a failure at different
times.

A joining worker first connects to all others, then writes a join request into the store. It reads
the decisions from the first number on, until one admits it or the run ends. A failure concerns one
incarnation: that worker stays failed for its group until the next decision, even if it has rejoined
by then.

gloo's collectives need all members. They raise an error at members connected to the failed one, and
others would wait forever. So waiting members check for failures from time to time, and each
decision makes a new gloo group.

Source: a new communicator of the survivors as in Bland et al., "Post-failure recovery of MPI
communication capability", IJHPCA 2013.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from ashl.errors import AshlError
from ashl.runtime.effects import CollectiveAborted, Formed, Regroup
from ashl.runtime.records import PeerUnreachable
from ashl.runtime.rendezvous import CHECK_S, SharedStore, call_unless_failed, make_group

T = TypeVar("T")
Groups = dict[tuple[int, ...], dist.ProcessGroup | None]
POLL_S = 0.002
CHECK = timedelta(seconds=CHECK_S)  # time between two checks for failures while a collective lasts
FAILURE_WAIT_S = 10.0  # seconds after an error within which the controller must name a failed rank


def join_key(rank: int, incarnation: int) -> str:
    """Return the key of a join request."""
    return f"regroup/join/{rank}/{incarnation}"


class Decision(NamedTuple):
    """A decision as written into the store.

    If `failed` is not empty, the survivors ask again, and the other fields have no effect.
    Otherwise the members continue from `version` of the model. A `signal` above 0 ends the stage or
    the run. `joined` lists the admitted workers as (rank, incarnation). `removed` lists members
    that have no model yet and have to join again.
    """

    failed: Sequence[int]
    version: int = 0
    signal: int = 0
    joined: Sequence[tuple[int, int]] = ()
    removed: Sequence[int] = ()


class RegroupConsensus:
    """One rank's part in all regroup decisions of a run."""

    def __init__(
        self,
        store: SharedStore,
        rank: int,
        workers: Iterable[int],
        emit: Callable[[PeerUnreachable], None],
        incarnation: int = 0,
    ) -> None:
        """Set up the part of a rank. `emit` sends a record to the controller; `incarnation` is
        above 0 if the rank joins while others run.
        """
        self.failed: frozenset[int] = frozenset()
        self._shared = store
        self._store = store.another()
        self._rank = rank
        self._incarnation = incarnation
        self._emit = emit
        self._members = tuple(workers)
        self._number = 0  # number of the latest decision
        # by rank: the incarnation that is a member, or was last
        self._incarnations = dict.fromkeys(self._members, 0)
        self._ended: dict[int, int] = {}  # by rank: the last incarnation that has failed
        # by rank: the incarnation that has joined and is connected to this rank
        self._connected: dict[int, int] = {}
        self._lock = threading.Lock()

    def mark_failed(self, rank: int, incarnation: int = 0) -> None:
        """Record that this incarnation has failed. Another thread may call it."""
        with self._lock:
            self._ended[rank] = max(incarnation, self._ended.get(rank, 0))
            self._update_failed()

    def mark_connected(self, rank: int, incarnation: int) -> None:
        """Record that a rank has joined in this incarnation. Another thread may call it."""
        self.mark_failed(rank, incarnation - 1)
        self._connected[rank] = incarnation

    @property
    def join_pending(self) -> bool:
        """Return True if a worker has joined that is no member."""
        return any(
            incarnation > max(self._incarnations[rank], self._ended[rank])
            for rank, incarnation in [*self._connected.items()]
        )

    def _update_failed(self) -> None:
        self.failed = frozenset(
            rank
            for rank, incarnation in self._ended.items()
            if incarnation >= self._incarnations[rank]
        )

    def failed_of(self, group: Sequence[int], incarnations: Sequence[int] = ()) -> frozenset[int]:
        """Return the failed members of a group; with `incarnations` those of a group that a
        coordinator formed.
        """
        if not incarnations:
            return self.failed.intersection(group)
        return frozenset(
            rank
            for rank, incarnation in zip(group, incarnations, strict=True)
            if self._ended.get(rank, -1) >= incarnation
        )

    def await_failure(
        self, group: Sequence[int], error: Exception, incarnations: Sequence[int] = ()
    ) -> CollectiveAborted:
        """Return the result of a collective that ended with an error: aborted by a failed member.
        Raises the error if no member has failed within `FAILURE_WAIT_S`.
        """
        until = time.monotonic() + FAILURE_WAIT_S
        known = dict(zip(group, incarnations, strict=True)) if incarnations else self._incarnations
        for rank in {*group} - {self._rank} if not self.failed_of(group, incarnations) else ():
            self._emit(PeerUnreachable(self._rank, rank, known[rank], alone=False))
        while not (known_failures := self.failed_of(group, incarnations)):
            if time.monotonic() > until:
                raise error
            time.sleep(POLL_S)
        return CollectiveAborted(min(known_failures))

    def wait(self, group: Iterable[int], work: Any) -> None:
        """Wait until a collective of this group has ended. Raises RuntimeError if a member
        failed.
        """
        while True:
            try:
                work.wait(CHECK)
            except RuntimeError:
                if work.is_completed():  # it may have ended right after the timeout
                    work.wait()
                    return
                if self.failed.intersection(group):
                    raise
            else:
                return

    def regroup(self, asked: Regroup, clock_ns: Callable[[], int]) -> tuple[Formed, Groups | None]:
        """Return the new group and, if its members changed, its process groups. A failure meanwhile
        leaves the process group None. Raises AshlError if no survivor has the model.
        """
        decision = self._next(asked)
        failed = [*decision.failed]
        while decision.failed or not (self._is_member or decision.signal > 1):
            decision = self._next(asked)
            failed += decision.failed
        joined = tuple(sorted(rank for rank, _ in decision.joined))
        formed = Formed(
            epoch=self._number,
            ranks=self._members,
            version=decision.version,
            signal=decision.signal,
            failed=tuple(failed),
            joined=joined,
            time_ns=clock_ns(),
            incarnations=tuple(self._incarnations[rank] for rank in self._members),
        )
        another = self._is_member and (failed or joined or decision.removed)
        return formed, {self._members: self._make_group()} if another else None

    @property
    def _is_member(self) -> bool:
        """Return True if this incarnation of the rank is a member."""
        return self._rank in self._members and self._incarnations[self._rank] == self._incarnation

    def _next(self, asked: Regroup) -> Decision:
        """Return the next decision and apply it."""
        decision = self._decide_with_group(asked) if self._is_member else self._read_decision()
        if decision.version < 0:
            raise self._no_model_error()
        with self._lock:
            leaving = {*decision.failed, *decision.removed}
            for rank in decision.removed:
                self._incarnations[rank] -= 1
            self._incarnations |= dict(decision.joined)
            self._members = tuple(
                sorted({*self._members} - leaving | {rank for rank, _ in decision.joined})
            )
            self._update_failed()
        return decision

    def _no_model_error(self) -> AshlError:
        return AshlError(
            f"0 of {len(self._incarnations)} workers remain that have the model: the run ends here"
        )

    def _decide_with_group(self, asked: Regroup) -> Decision:
        """Return the next decision of a group with this rank as a member."""
        self._number += 1
        name, store, group = f"regroup/{self._number}", self._store, self._members
        store.set(f"{name}/{self._rank}", json.dumps(asked))
        while not store.check([f"{name}/is"]):
            if known_failures := self.failed.intersection(group):
                decision = Decision(sorted(known_failures))
            elif store.check([f"{name}/{rank}" for rank in group]):
                decision = self._make_decision(
                    {rank: Regroup(*json.loads(store.get(f"{name}/{rank}"))) for rank in group}
                )
            else:
                time.sleep(POLL_S)
                continue
            store.compare_set(f"{name}/is", "", json.dumps(decision))
        return Decision(*json.loads(store.get(f"{name}/is")))

    def _make_decision(self, asks: Mapping[int, Regroup]) -> Decision:
        """Return the decision that follows from the requests of all members."""
        removed = [rank for rank, asked in asks.items() if asked.version < 0]
        known = [asked for asked in asks.values() if asked.version >= 0]
        if not known:
            return Decision([], -1)
        version = min(asked.version for asked in known)
        signal = (
            0
            if any(asked.version > version for asked in known)
            else max(asked.signal for asked in known)
        )
        joined = []
        if not signal and all(asked.open for asked in known):
            joined = [
                worker
                for worker in self._connected.items()
                if worker[1] > max(self._incarnations[worker[0]], self._ended[worker[0]])
            ]
            joined = [worker for worker in joined if self._store.check([join_key(*worker)])]
        return Decision([], version, signal, joined, removed)

    def _read_decision(self) -> Decision:
        """Return the next decision of a group without this rank."""
        name, store = f"regroup/{self._number + 1}/is", self._store
        store.set(join_key(self._rank, self._incarnation), "")
        while not store.check([name]):
            if self.failed.issuperset({*self._members} - {self._rank}):
                raise self._no_model_error()
            time.sleep(POLL_S)
        self._number += 1
        return Decision(*json.loads(store.get(name)))

    def _make_group(self) -> dist.ProcessGroup | None:
        group = self._members
        if len(group) == 1:
            return None
        meet = partial(
            make_group,
            f"group/{self._number}",
            self._shared.another(),
            group.index(self._rank),
            len(group),
        )
        try:
            return call_unless_failed(meet, lambda: bool(self.failed.intersection(group)))
        except RuntimeError as error:
            self.await_failure(group, error)
            return None
