"""Membership of process groups in virtual time: failed members leave them, joining workers enter
them.

A collective that lacks a failed member is aborted: every other member receives
`CollectiveAborted` once it has
noticed the failure, even if the collective was in flight. So all members receive the result, or
none does. The survivors then ask to regroup; when all have asked, they form a new group and admit
the waiting workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from heapq import heapify
from operator import itemgetter
from typing import Any

from ashl.runtime.collective_queue import Collective, CollectiveQueue
from ashl.runtime.effects import CollectiveAborted, Formed, Regroup
from ashl.runtime.kernel import Task
from ashl.runtime.rank_context import RankContext
from ashl.runtime.sim import Sim


class SimMembership:
    """Stands between a simulation and its channels. `noticed` are the losses so far, in the order
    in which others knew of them: how many of these a team has taken into account is its epoch.
    """

    def __init__(self, sim: Sim, workers: int) -> None:
        self.sim = sim
        self.losses = Counter[int]()
        self.noticed: list[int] = []
        self._team = 0, tuple(range(workers))  # (epoch, ranks)
        self.members = set(
            range(workers)
        )  # of the team that regroups: those who are not known to be gone
        self.knowing = set(range(workers))  # who has the model
        self._last: Formed | None = None  # with which the run ends
        self._asked: dict[int, tuple[Task, Regroup]] = {}
        self._waiting: set[int] = set()  # who has asked to be let in, and was not in a sum since
        self._stuck: dict[
            int, list[tuple[Task, Collective]]
        ] = {}  # by rank: in what can come to nothing any more
        self._under_way: list[tuple[int, tuple[int, ...]]] = []  # sums: until when, and of whom
        self._unnoticed: set[int] = set()  # who is lost, and nobody has noticed
        self._uninformed: set[tuple[int, int]] = (
            set()
        )  # (rank, who is lost, and it has not noticed)
        sim._post, sim._begin, sim.safe_point = self.post, self.begin, self.safe_point  # type: ignore[method-assign]

    def post(self, task: Task, effect: Collective | Regroup) -> None:
        rank = task.ctx.rank
        if isinstance(effect, Regroup):
            if self._last is not None:
                return self._at(task, self._last)
            self._asked[rank] = task, effect
            if effect.version < 0:
                self._waiting.add(rank)
            if effect.version < 0 and rank not in self.members:
                for ctx in self.sim.contexts:
                    ctx.join_pending = True
            return self._form()
        self.knowing.add(rank)
        self._waiting.discard(rank)
        if len(self.noticed) == effect.epoch and not self._unnoticed:
            return type(self.sim)._post(self.sim, task, effect)
        known = Counter(self.noticed[: effect.epoch])
        lost = (
            [other for other in effect.group if self.losses[other] > known[other]]
            if self.losses
            else []
        )
        if not lost:
            return type(self.sim)._post(self.sim, task, effect)
        heard = [other for other in lost if (rank, other) not in self._uninformed]
        if heard:
            self._at(task, CollectiveAborted(heard[0]))
        else:
            self._stuck.setdefault(rank, []).append((task, effect))

    def safe_point(self, ctx: RankContext, stage: int, state: Any) -> bool:
        """Who is at the top of a loop has a model, but for who has yet to be in a sum with those
        that let it in.
        """
        if ctx.rank not in self._waiting:
            self.knowing.add(ctx.rank)
        return type(self.sim).safe_point(self.sim, ctx, stage, state)

    def begin(self, collective_queue: CollectiveQueue) -> None:
        if not collective_queue.ready:
            return  # the team has lost a member
        type(self.sim)._begin(self.sim, collective_queue)
        self._under_way = [one for one in self._under_way if one[0] > self.sim.now_ns]
        self._under_way.append((collective_queue.free_ns, collective_queue.group))

    def _at(self, task: Task, value: Any) -> None:
        """Resume the task at this instant."""
        self.sim._at(self.sim.now_ns, task, value)

    def fail_member(self, rank: int, peers: Sequence[int]) -> None:
        """A worker is gone, and these will notice."""
        sim, now = self.sim, self.sim.now_ns
        self.losses[rank] += 1
        self._unnoticed.add(rank)
        self._uninformed |= {(peer, rank) for peer in peers}
        self._uninformed = {pair for pair in self._uninformed if pair[0] != rank}
        self.knowing.discard(rank)
        self._asked.pop(rank, None)
        self._stuck.pop(rank, None)
        for task in sim.collective_queues.abort_with_member(rank):
            if task.ctx.rank != rank:
                self._stuck.setdefault(task.ctx.rank, []).append((task, task.waiting))
        for _, group in [one for one in self._under_way if rank in one[1] and one[0] > now]:
            self._revoke_results([peer for peer in group if peer != rank], group)
        self._under_way = [one for one in self._under_way if rank not in one[1]]

    def _revoke_results(self, ranks: list[int], group: tuple[int, ...]) -> None:
        """These will not have the result that they wait for."""
        sim, now = self.sim, self.sim.now_ns
        there = (
            target
            for _, _, target, _ in sorted(sim._heap, key=itemgetter(0, 1))
            if isinstance(target, Task)
        )
        waiting = [
            task
            for task in there
            if isinstance(task.waiting, Collective) and task.waiting.group == group
        ]
        waiting = sorted(
            (task for task in waiting if task.ctx.rank in ranks), key=lambda task: task.ctx.rank
        )
        for task in waiting:
            if task.main:
                task.ctx.time_accounting.truncate_at(now, now, now)
            task.ctx.time_accounting.abort_collectives(now)
            self._stuck.setdefault(task.ctx.rank, []).append((task, task.waiting))
        sim._heap[:] = [event for event in sim._heap if event[2] not in waiting]
        heapify(sim._heap)

    def noticed_by(self, peer: int, rank: int) -> None:
        """This peer has noticed that this worker is gone."""
        sim = self.sim
        self._uninformed.discard((peer, rank))
        stuck = self._stuck.pop(peer, [])
        for task, effect in stuck:
            if rank in effect.group:
                if task.main:
                    task.ctx.time_accounting.attribute_idle(sim.now_ns)
                sim._resume(task, CollectiveAborted(rank))
            else:
                self._stuck.setdefault(peer, []).append((task, effect))
        self.note_failure(rank)

    def note_failure(self, rank: int) -> None:
        """That this worker is gone is known now, at least to somebody."""
        if rank in self._unnoticed:
            self._unnoticed.discard(rank)
            self.noticed.append(rank)
            self.members.discard(rank)
            self._form()

    def _form(self) -> None:
        """The next team, once all who are left have asked."""
        known = {rank: self._asked[rank][1] for rank in self.members & self._asked.keys()}
        versions = [effect.version for effect in known.values() if effect.version >= 0]
        if not versions or len(known) < len(self.members):
            return
        last = min(versions)
        signal = 0 if max(versions) > last else max(effect.signal for effect in known.values())
        opens = not signal and all(effect.open for effect in known.values() if effect.version >= 0)
        came = (
            []
            if not opens
            else [rank for rank, (_, effect) in self._asked.items() if effect.version < 0]
        )
        ranks = tuple(
            sorted({*came, *(rank for rank, effect in known.items() if effect.version >= 0)})
        )
        lost = tuple(rank for rank in self._team[1] if rank in self.noticed[self._team[0] :])
        times = Counter(self.noticed)
        incarnations = tuple(times[rank] for rank in ranks)
        formed = Formed(
            len(self.noticed),
            ranks,
            last,
            signal,
            lost,
            tuple(sorted(came)),
            self.sim.now_ns,
            incarnations,
        )
        self._team = len(self.noticed), ranks
        if signal > 1:
            self._last = formed
        self.members = set(ranks)
        for rank in sorted(self._asked):
            if rank in ranks or signal > 1:
                self._at(self._asked.pop(rank)[0], formed)
        for ctx in self.sim.contexts:
            ctx.join_pending = bool(self._asked)
