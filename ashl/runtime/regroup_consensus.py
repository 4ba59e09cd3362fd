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
from ashl.runtime.rendezvous import LOOK_S, SharedStore, call_unless_failed, make_group

T = TypeVar("T")
Groups = dict[tuple[int, ...], dist.ProcessGroup | None]
POLL_S = 0.002
LOOK = timedelta(seconds=LOOK_S)  # between two looks at who is lost, while a collective lasts
KNOWN_S = 10.0  # how long after an error home may take to say who is lost


def join_key(rank: int, incarnation: int) -> str:
    """The key of who has come."""
    return f"team/knock/{rank}/{incarnation}"


class Decision(NamedTuple):
    """What is written of an agreement: who is lost of those who were to ask; else from which
    version of the model the others go on, the word, who comes in, in which life, and who is out
    again, as it has no model yet.
    """

    lost: Sequence[int]
    version: int = 0
    signal: int = 0
    came: Sequence[tuple[int, int]] = ()
    out: Sequence[int] = ()


class RegroupConsensus:
    """One rank's part in all agreements of a run."""

    def __init__(
        self,
        store: SharedStore,
        rank: int,
        workers: Iterable[int],
        emit: Callable[[PeerUnreachable], None],
        incarnation: int = 0,
    ) -> None:
        """`emit` tells home, `incarnation` is above 0 where it comes while the others run."""
        self.lost: frozenset[int] = frozenset()
        self._shared, self._store, self._rank, self._incarnation = (
            store,
            store.another(),
            rank,
            incarnation,
        )
        self._emit = emit
        self._team, self._number = tuple(workers), 0
        self._incarnations = dict.fromkeys(
            self._team, 0
        )  # the one of each that is in the team, or was last
        self._gone: dict[int, int] = {}  # the last one of each that is over
        self._met: dict[int, int] = {}  # the one of each that has come and is linked to this rank
        self._lock = threading.Lock()

    def mark_failed(self, rank: int, incarnation: int = 0) -> None:
        """This life of it is over. May be called from another thread."""
        with self._lock:
            self._gone[rank] = max(incarnation, self._gone.get(rank, 0))
            self._update_lost()

    def mark_connected(self, rank: int, incarnation: int) -> None:
        """It has come anew. May be called from another thread."""
        self.mark_failed(rank, incarnation - 1)
        self._met[rank] = incarnation

    @property
    def join_pending(self) -> bool:
        """Whether somebody has come who is not in the team."""
        return any(
            incarnation > max(self._incarnations[rank], self._gone[rank])
            for rank, incarnation in [*self._met.items()]
        )

    def _update_lost(self) -> None:
        self.lost = frozenset(
            rank
            for rank, incarnation in self._gone.items()
            if incarnation >= self._incarnations[rank]
        )

    def lost_of(self, group: Sequence[int], incarnations: Sequence[int] = ()) -> frozenset[int]:
        """Who is lost of a team; where others have formed it, of these lives of its members."""
        if not incarnations:
            return self.lost.intersection(group)
        return frozenset(
            rank
            for rank, incarnation in zip(group, incarnations, strict=True)
            if self._gone.get(rank, -1) >= incarnation
        )

    def await_failure(
        self, group: Sequence[int], error: Exception, incarnations: Sequence[int] = ()
    ) -> CollectiveAborted:
        """What comes of a collective of this team that has ended with an error; raises it where
        nobody is lost.
        """
        until = time.monotonic() + KNOWN_S
        known = dict(zip(group, incarnations, strict=True)) if incarnations else self._incarnations
        for rank in {*group} - {self._rank} if not self.lost_of(group, incarnations) else ():
            self._emit(PeerUnreachable(self._rank, rank, known[rank], alone=False))
        while not (gone := self.lost_of(group, incarnations)):
            if time.monotonic() > until:
                raise error
            time.sleep(POLL_S)
        return CollectiveAborted(min(gone))

    def wait(self, group: Iterable[int], work: Any) -> None:
        """Until a collective of this team has ended. Raises RuntimeError where it never will."""
        while True:
            try:
                work.wait(LOOK)
            except RuntimeError:
                if work.is_completed():  # perhaps just now, after the look was over
                    work.wait()
                    return
                if self.lost.intersection(group):
                    raise
            else:
                return

    def regroup(self, asked: Regroup, clock_ns: Callable[[], int]) -> tuple[Formed, Groups | None]:
        """The new team and, where it is another one than before, its group, if one more is lost
        meanwhile without any. Raises AshlError where nobody is left who has the model.
        """
        decision = self._next(asked)
        lost = [*decision.lost]
        while decision.lost or not (self._is_member or decision.signal > 1):
            decision = self._next(asked)
            lost += decision.lost
        came = tuple(sorted(rank for rank, _ in decision.came))
        how = decision.version, decision.signal, tuple(lost), came, clock_ns()
        formed = Formed(
            self._number, self._team, *how, tuple(self._incarnations[rank] for rank in self._team)
        )
        another = self._is_member and (lost or came or decision.out)
        return formed, {self._team: self._group()} if another else None

    @property
    def _is_member(self) -> bool:
        """Whether this rank, in its present life, is in the team."""
        return self._rank in self._team and self._incarnations[self._rank] == self._incarnation

    def _next(self, asked: Regroup) -> Decision:
        """The next agreement, once it is taken into account."""
        decision = self._decide_with_group(asked) if self._is_member else self._read_decision()
        if decision.version < 0:
            raise self._no_model_error()
        with self._lock:
            away = {*decision.lost, *decision.out}
            for rank in decision.out:
                self._incarnations[rank] -= 1
            self._incarnations |= dict(decision.came)
            self._team = tuple(sorted({*self._team} - away | {rank for rank, _ in decision.came}))
            self._update_lost()
        return decision

    def _no_model_error(self) -> AshlError:
        return AshlError(
            f"0 of {len(self._incarnations)} workers remain that have the model: the run ends here"
        )

    def _decide_with_group(self, asked: Regroup) -> Decision:
        """The next agreement, of a team that this rank is in."""
        self._number += 1
        name, store, group = f"team/{self._number}", self._store, self._team
        store.set(f"{name}/{self._rank}", json.dumps(asked))
        while not store.check([f"{name}/is"]):
            if gone := self.lost.intersection(group):
                decision = Decision(sorted(gone))
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
        """What these come to."""
        out = [rank for rank, asked in asks.items() if asked.version < 0]
        known = [asked for asked in asks.values() if asked.version >= 0]
        if not known:
            return Decision([], -1)
        version = min(asked.version for asked in known)
        signal = (
            0
            if any(asked.version > version for asked in known)
            else max(asked.signal for asked in known)
        )
        came = []
        if not signal and all(asked.open for asked in known):
            came = [
                one
                for one in self._met.items()
                if one[1] > max(self._incarnations[one[0]], self._gone[one[0]])
            ]
            came = [one for one in came if self._store.check([join_key(*one)])]
        return Decision([], version, signal, came, out)

    def _read_decision(self) -> Decision:
        """The next agreement, of others."""
        name, store = f"team/{self._number + 1}/is", self._store
        store.set(join_key(self._rank, self._incarnation), "")
        while not store.check([name]):
            if self.lost.issuperset({*self._team} - {self._rank}):
                raise self._no_model_error()
            time.sleep(POLL_S)
        self._number += 1
        return Decision(*json.loads(store.get(name)))

    def _group(self) -> dist.ProcessGroup | None:
        group = self._team
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
            return call_unless_failed(meet, lambda: bool(self.lost.intersection(group)))
        except RuntimeError as error:
            self.await_failure(group, error)
            return None
