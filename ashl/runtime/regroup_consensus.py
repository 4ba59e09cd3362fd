"""How the processes of a team agree to go on without who is lost and with who has come, and get a group of gloo's of
their own.

Home says who is lost; when that is to be taken into account, the team decides. Everybody asks in the job's store, under
the number of this agreement. Whoever sees there that all have asked, or hears first that one of them is lost, writes
down which it is, and what is written first holds for all. Where it is a loss, those who are left ask once more, under
the next number. So all members of a team have the same agreements one after the other, though one sees a loss early and
another has gone on by then.

Who comes is linked to all others first, and then knocks, in the store, too. It reads what was agreed, from the first
number on, until it is let in, or the run is over. A loss is that of one life: who is lost stays so for its team until
that has formed anew, though it may be back by then.

gloo's collectives need all members of a group, and end with an error at those that are connected to a lost one, while
others would wait for good. So who waits looks up now and then, and a new team has a new group, under its agreement's
number: nothing of an old one can come through it.

Source: a new communicator of those who are left as in Bland et al., "Post-failure recovery of MPI communication
capability", IJHPCA 2013.
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
from ashl.runtime.effects import Broken, Formed, Regroup
from ashl.runtime.records import PeerUnreachable
from ashl.runtime.rendezvous import LOOK_S, SharedStore, of_some, watched

T = TypeVar("T")
Groups = dict[tuple[int, ...], dist.ProcessGroup | None]
POLL_S = 0.002
LOOK = timedelta(seconds=LOOK_S)  # between two looks at who is lost, while a collective lasts
KNOWN_S = 10.0  # how long after an error home may take to say who is lost


def knock(rank: int, life: int) -> str:
    """The key of who has come."""
    return f"team/knock/{rank}/{life}"


class Decision(NamedTuple):
    """What is written of an agreement: who is lost of those who were to ask; else from which version of the model the
    others go on, the word, who comes in, in which life, and who is out again, as it has no model yet."""

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
        life: int = 0,
    ) -> None:
        """`emit` tells home, `life` is above 0 where it comes while the others run."""
        self.lost: frozenset[int] = frozenset()
        self._shared, self._store, self._rank, self._life = store, store.another(), rank, life
        self._emit = emit
        self._team, self._number = tuple(workers), 0
        self._lives = dict.fromkeys(self._team, 0)  # the one of each that is in the team, or was last
        self._gone: dict[int, int] = {}  # the last one of each that is over
        self._met: dict[int, int] = {}  # the one of each that has come and is linked to this rank
        self._lock = threading.Lock()

    def lose(self, rank: int, life: int = 0) -> None:
        """This life of it is over. May be called from another thread."""
        with self._lock:
            self._gone[rank] = max(life, self._gone.get(rank, 0))
            self._note_the_lost()

    def meet(self, rank: int, life: int) -> None:
        """It has come anew. May be called from another thread."""
        self.lose(rank, life - 1)
        self._met[rank] = life

    @property
    def join_pending(self) -> bool:
        """Whether somebody has come who is not in the team."""
        return any(life > max(self._lives[rank], self._gone[rank]) for rank, life in [*self._met.items()])

    def _note_the_lost(self) -> None:
        self.lost = frozenset(rank for rank, life in self._gone.items() if life >= self._lives[rank])

    def lost_of(self, team: Sequence[int], lives: Sequence[int] = ()) -> frozenset[int]:
        """Who is lost of a team; where others have formed it, of these lives of its members."""
        if not lives:
            return self.lost.intersection(team)
        return frozenset(rank for rank, life in zip(team, lives, strict=True) if self._gone.get(rank, -1) >= life)

    def broken(self, team: Sequence[int], error: Exception, lives: Sequence[int] = ()) -> Broken:
        """What comes of a collective of this team that has ended with an error; raises it where nobody is lost."""
        until = time.monotonic() + KNOWN_S
        known = dict(zip(team, lives, strict=True)) if lives else self._lives
        for rank in {*team} - {self._rank} if not self.lost_of(team, lives) else ():
            self._emit(PeerUnreachable(self._rank, rank, known[rank], alone=False))
        while not (gone := self.lost_of(team, lives)):
            if time.monotonic() > until:
                raise error
            time.sleep(POLL_S)
        return Broken(min(gone))

    def wait(self, team: Iterable[int], work: Any) -> None:
        """Until a collective of this team has ended. Raises RuntimeError where it never will."""
        while True:
            try:
                work.wait(LOOK)
            except RuntimeError:
                if work.is_completed():  # perhaps just now, after the look was over
                    work.wait()
                    return
                if self.lost.intersection(team):
                    raise
            else:
                return

    def regroup(self, asked: Regroup, clock_ns: Callable[[], int]) -> tuple[Formed, Groups | None]:
        """The new team and, where it is another one than before, its group, if one more is lost meanwhile without any.
        Raises AshlError where nobody is left who has the model."""
        decision = self._next(asked)
        lost = [*decision.lost]
        while decision.lost or not (self._inside or decision.signal > 1):
            decision = self._next(asked)
            lost += decision.lost
        came = tuple(sorted(rank for rank, _ in decision.came))
        how = decision.version, decision.signal, tuple(lost), came, clock_ns()
        formed = Formed(self._number, self._team, *how, tuple(self._lives[rank] for rank in self._team))
        another = self._inside and (lost or came or decision.out)
        return formed, {self._team: self._group()} if another else None

    @property
    def _inside(self) -> bool:
        """Whether this rank, in its present life, is in the team."""
        return self._rank in self._team and self._lives[self._rank] == self._life

    def _next(self, asked: Regroup) -> Decision:
        """The next agreement, once it is taken into account."""
        decision = self._decided(asked) if self._inside else self._read()
        if decision.version < 0:
            raise self._nobody()
        with self._lock:
            away = {*decision.lost, *decision.out}
            for rank in decision.out:
                self._lives[rank] -= 1
            self._lives |= dict(decision.came)
            self._team = tuple(sorted({*self._team} - away | {rank for rank, _ in decision.came}))
            self._note_the_lost()
        return decision

    def _nobody(self) -> AshlError:
        return AshlError(f"0 of {len(self._lives)} workers remain that have the model: the run ends here")

    def _decided(self, asked: Regroup) -> Decision:
        """The next agreement, of a team that this rank is in."""
        self._number += 1
        name, store, team = f"team/{self._number}", self._store, self._team
        store.set(f"{name}/{self._rank}", json.dumps(asked))
        while not store.check([f"{name}/is"]):
            if gone := self.lost.intersection(team):
                decision = Decision(sorted(gone))
            elif store.check([f"{name}/{rank}" for rank in team]):
                decision = self._agreed({rank: Regroup(*json.loads(store.get(f"{name}/{rank}"))) for rank in team})
            else:
                time.sleep(POLL_S)
                continue
            store.compare_set(f"{name}/is", "", json.dumps(decision))
        return Decision(*json.loads(store.get(f"{name}/is")))

    def _agreed(self, asks: Mapping[int, Regroup]) -> Decision:
        """What these come to."""
        out = [rank for rank, asked in asks.items() if asked.version < 0]
        known = [asked for asked in asks.values() if asked.version >= 0]
        if not known:
            return Decision([], -1)
        version = min(asked.version for asked in known)
        signal = 0 if any(asked.version > version for asked in known) else max(asked.signal for asked in known)
        came = []
        if not signal and all(asked.open for asked in known):
            came = [one for one in self._met.items() if one[1] > max(self._lives[one[0]], self._gone[one[0]])]
            came = [one for one in came if self._store.check([knock(*one)])]
        return Decision([], version, signal, came, out)

    def _read(self) -> Decision:
        """The next agreement, of others."""
        name, store = f"team/{self._number + 1}/is", self._store
        store.set(knock(self._rank, self._life), "")
        while not store.check([name]):
            if self.lost.issuperset({*self._team} - {self._rank}):
                raise self._nobody()
            time.sleep(POLL_S)
        self._number += 1
        return Decision(*json.loads(store.get(name)))

    def _group(self) -> dist.ProcessGroup | None:
        team = self._team
        if len(team) == 1:
            return None
        meet = partial(of_some, f"group/{self._number}", self._shared.another(), team.index(self._rank), len(team))
        try:
            return watched(meet, lambda: bool(self.lost.intersection(team)))
        except RuntimeError as error:
            self.broken(team, error)
            return None
