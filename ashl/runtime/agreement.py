"""How the processes that are left of a team agree to go on, and get a group of gloo's of their own.

Home says who is lost; when that is to be taken into account, the team decides. Everybody asks in the job's store, under
the number of this agreement. Whoever sees there that all have asked, or hears first that one of them is lost, writes
down which it is, and what is written first holds for all. Where it is a loss, those who are left ask once more, under
the next number. So all members of a team have the same agreements one after the other, though one sees a loss early and
another has gone on by then.

gloo's collectives need all members of a group, and end with an error at those that are connected to a lost one, while
others would wait for good. So who waits looks up now and then, and a new team has a new group, under its agreement's
number: nothing of an old one can come through it.

Source: a new communicator of those who are left as in Bland et al., "Post-failure recovery of MPI communication
capability", IJHPCA 2013.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch.distributed as dist

from ashl.runtime.effects import Broken, Formed, Regroup
from ashl.runtime.plane import NEVER

T = TypeVar("T")
POLL_S = 0.002
LOOK = timedelta(seconds=0.2)  # between two looks at who is lost, while a collective lasts
KNOWN_S = 10.0  # how long after an error home may take to say who is lost


class Shared(Protocol):
    """What an agreement needs of the job's store."""

    def another(self) -> dist.Store: ...


class Decision(NamedTuple):
    """What is written of an agreement: who is lost of those who were to ask; else from which version of the model the
    others go on, and the word."""

    lost: list[int]
    version: int = 0
    word: int = 0


class Agreement:
    """One rank's part in all agreements of a run."""

    def __init__(self, store: Shared, rank: int, workers: Iterable[int]) -> None:
        self.lost: frozenset[int] = frozenset()
        self._shared, self._store, self._rank = store, store.another(), rank
        self._team, self._number = tuple(workers), 0

    def lose(self, rank: int) -> None:
        """It is gone for good. May be called from another thread."""
        self.lost = self.lost | {rank}

    def broken(self, team: Iterable[int], error: Exception) -> Broken:
        """What comes of a collective of this team that has ended with an error; raises it where nobody is lost."""
        until = time.monotonic() + KNOWN_S
        while not (gone := self.lost.intersection(team)):
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

    def beside(self, team: Iterable[int], act: Callable[[], T]) -> T:
        """What messages of our own among this team come to, which cannot be waited for a while at a time: gloo would
        break the links. Raises RuntimeError where they never end."""
        done: queue.SimpleQueue = queue.SimpleQueue()

        def run() -> None:
            try:
                done.put((act(), None))
            except Exception as error:
                done.put((None, error))

        threading.Thread(target=run, daemon=True, name="sum").start()
        while True:
            with suppress(queue.Empty):
                value, error = done.get(timeout=LOOK.total_seconds())
                if error is not None:
                    raise error
                return value
            if self.lost.intersection(team):
                raise RuntimeError("a member of the team is lost")

    def regroup(self, asked: Regroup, clock_ns: Callable[[], int]) -> tuple[Formed, dist.ProcessGroup | None]:
        """The new team and, where it is another one than before, its group, unless one more is lost meanwhile."""
        before, left = self._team, self._team
        while (decision := self._decided(left, asked)).lost:
            left = tuple(rank for rank in left if rank not in decision.lost)
        lost = tuple(rank for rank in before if rank not in left)
        formed = Formed(self._number, left, decision.version, decision.word, lost, (), clock_ns())
        self._team = left
        return formed, self._group() if lost and len(left) > 1 else None

    def _decided(self, left: tuple[int, ...], asked: Regroup) -> Decision:
        """The next agreement, of these ranks."""
        self._number += 1
        name, store = f"team/{self._number}", self._store
        store.set(f"{name}/{self._rank}", json.dumps([asked.version, asked.word]))
        while not store.check([f"{name}/is"]):
            if gone := self.lost.intersection(left):
                decision = Decision(sorted(gone))
            elif store.check([f"{name}/{rank}" for rank in left]):
                versions, words = zip(*(json.loads(store.get(f"{name}/{rank}")) for rank in left), strict=True)
                decision = Decision([], min(versions), 0 if max(versions) > min(versions) else max(words))
            else:
                time.sleep(POLL_S)
                continue
            store.compare_set(f"{name}/is", "", json.dumps(decision))
        return Decision(*json.loads(store.get(f"{name}/is")))

    def _group(self) -> dist.ProcessGroup | None:
        """gloo would wait for good for one that is lost meanwhile, so a thread does."""
        made, failed, team = list[dist.ProcessGroup](), list[Exception](), self._team
        store = self._shared.another()

        def make() -> None:
            try:
                own = dist.PrefixStore(f"group/{self._number}/", store)
                group = dist.ProcessGroupGloo(own, team.index(self._rank), len(team), NEVER)
                made.append(cast("dist.ProcessGroup", group))
            except Exception as error:
                failed.append(error)

        threading.Thread(target=make, daemon=True, name="group").start()
        while not made:
            if self.lost.intersection(team):
                return None
            if failed:
                self.broken(team, failed[0])
            time.sleep(POLL_S)
        return made[0]
