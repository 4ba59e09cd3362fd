"""Membership of process groups in virtual time: failures, aborted collectives, and regrouping.

A collective is aborted if a member fails before the collective has ended. Each other member then
receives `CollectiveAborted` once it has noticed the failure. So all members receive the result, or
none does: results that are scheduled for a later time are removed (`_revoke_results`).

States of a group: running; then, after a failure or for a joining worker, each member posts
`Regroup`; once all members have asked, a new group is formed (`Formed`). It continues from the
lowest version of the model among its members. Joining workers are admitted only if every member
sets `Regroup.open` and no signal ends the stage or the run.
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
    """The membership of groups; it replaces `_post`, `_begin` and `safe_point` of a simulation.

    `noticed_failures` lists the failed workers in the order in which a first peer noticed each
    failure. The epoch of a group is the length of this list when the group was formed.
    """

    def __init__(self, sim: Sim, workers: int) -> None:
        self.sim = sim
        self.failures = Counter[int]()  # failures of each rank so far
        self.noticed_failures: list[int] = []
        self._current = 0, tuple(range(workers))  # (epoch, ranks) of the group formed last
        # members of the group formed last, without those whose failure a peer has noticed
        self.members = set(range(workers))
        self.with_model = set(range(workers))  # running workers that have a model
        self._final: Formed | None = None  # the last group, once the run ends
        # requests to regroup without an answer, by rank
        self._asked: dict[int, tuple[Task, Regroup]] = {}
        # workers that asked to join and have posted no collective since then
        self._waiting: set[int] = set()
        # by rank: tasks that wait for an aborted collective, until the rank notices the failure
        self._stuck: dict[int, list[tuple[Task, Collective]]] = {}
        # collectives in flight: (time of the end in ns, group)
        self._in_flight: list[tuple[int, tuple[int, ...]]] = []
        self._unnoticed: set[int] = set()  # failed workers that no peer has noticed
        # (rank, failed worker that the rank has not noticed)
        self._uninformed: set[tuple[int, int]] = set()
        sim._post, sim._begin, sim.safe_point = self.post, self.begin, self.safe_point  # type: ignore[method-assign]

    def post(self, task: Task, effect: Collective | Regroup) -> None:
        """Post a collective, or a request to regroup.

        A collective whose group lacks a failed member is aborted instead.
        """
        rank = task.ctx.rank
        if isinstance(effect, Regroup):
            if self._final is not None:
                return self._at(task, self._final)
            self._asked[rank] = task, effect
            if effect.version < 0:
                self._waiting.add(rank)
            if effect.version < 0 and rank not in self.members:
                for ctx in self.sim.contexts:
                    ctx.join_pending = True
            return self._form()
        self.with_model.add(rank)
        self._waiting.discard(rank)
        if len(self.noticed_failures) == effect.epoch and not self._unnoticed:
            return type(self.sim)._post(self.sim, task, effect)
        known = Counter(self.noticed_failures[: effect.epoch])
        failed = (
            [other for other in effect.group if self.failures[other] > known[other]]
            if self.failures
            else []
        )
        if not failed:
            return type(self.sim)._post(self.sim, task, effect)
        known_failures = [other for other in failed if (rank, other) not in self._uninformed]
        if known_failures:
            self._at(task, CollectiveAborted(known_failures[0]))
        else:
            self._stuck.setdefault(rank, []).append((task, effect))

    def safe_point(self, ctx: RankContext, stage: int, state: Any) -> bool:
        """Pass a safe point to the simulation, and record that the rank has a model.

        A rank that asked to join has none before its first collective.
        Returns: as `Sim.safe_point`.
        """
        if ctx.rank not in self._waiting:
            self.with_model.add(ctx.rank)
        return type(self.sim).safe_point(self.sim, ctx, stage, state)

    def begin(self, collective_queue: CollectiveQueue) -> None:
        """Begin the next collective of a queue, and record until when it is in flight."""
        if not collective_queue.ready:
            return  # no collective is complete, because a member has failed
        type(self.sim)._begin(self.sim, collective_queue)
        self._in_flight = [entry for entry in self._in_flight if entry[0] > self.sim.now_ns]
        self._in_flight.append((collective_queue.free_ns, collective_queue.group))

    def _at(self, task: Task, value: Any) -> None:
        """Resume the task at this instant."""
        self.sim._at(self.sim.now_ns, task, value)

    def fail_member(self, rank: int, peers: Sequence[int]) -> None:
        """Record the failure of a worker, and abort its collectives.

        `peers` are the ranks that will notice the failure later.
        """
        sim, now = self.sim, self.sim.now_ns
        self.failures[rank] += 1
        self._unnoticed.add(rank)
        self._uninformed |= {(peer, rank) for peer in peers}
        self._uninformed = {pair for pair in self._uninformed if pair[0] != rank}
        self.with_model.discard(rank)
        self._asked.pop(rank, None)
        self._stuck.pop(rank, None)
        for task in sim.collective_queues.abort_with_member(rank):
            if task.ctx.rank != rank:
                self._stuck.setdefault(task.ctx.rank, []).append((task, task.waiting))
        for _, group in [entry for entry in self._in_flight if rank in entry[1] and entry[0] > now]:
            self._revoke_results([peer for peer in group if peer != rank], group)
        self._in_flight = [entry for entry in self._in_flight if rank not in entry[1]]

    def _revoke_results(self, ranks: list[int], group: tuple[int, ...]) -> None:
        """Remove the scheduled results of an aborted collective for these ranks."""
        sim, now = self.sim, self.sim.now_ns
        scheduled = (
            target
            for _, _, target, _ in sorted(sim._heap, key=itemgetter(0, 1))
            if isinstance(target, Task)
        )
        waiting = [
            task
            for task in scheduled
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
        """Record that a peer has noticed the failure of worker `rank`.

        The peer receives `CollectiveAborted` from each collective with this worker that it awaits.
        """
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
        """Record that at least one peer knows of this failure."""
        if rank in self._unnoticed:
            self._unnoticed.discard(rank)
            self.noticed_failures.append(rank)
            self.members.discard(rank)
            self._form()

    def _form(self) -> None:
        """Form the next group, if all members have asked and one of them has a model.

        The signal is 0 if the members' versions differ, because the round is then repeated.
        """
        known = {rank: self._asked[rank][1] for rank in self.members & self._asked.keys()}
        versions = [effect.version for effect in known.values() if effect.version >= 0]
        if not versions or len(known) < len(self.members):
            return
        version = min(versions)
        signal = 0 if max(versions) > version else max(effect.signal for effect in known.values())
        admits = not signal and all(effect.open for effect in known.values() if effect.version >= 0)
        joined = list[int]()
        if admits:
            joined = [rank for rank, (_, effect) in self._asked.items() if effect.version < 0]
        ranks = tuple(
            sorted({*joined, *(rank for rank, effect in known.items() if effect.version >= 0)})
        )
        failed = tuple(
            rank for rank in self._current[1] if rank in self.noticed_failures[self._current[0] :]
        )
        failures = Counter(self.noticed_failures)
        incarnations = tuple(failures[rank] for rank in ranks)
        formed = Formed(
            epoch=len(self.noticed_failures),
            ranks=ranks,
            version=version,
            signal=signal,
            failed=failed,
            joined=tuple(sorted(joined)),
            time_ns=self.sim.now_ns,
            incarnations=incarnations,
        )
        self._current = len(self.noticed_failures), ranks
        if signal > 1:
            self._final = formed
        self.members = set(ranks)
        for rank in sorted(self._asked):
            if rank in ranks or signal > 1:
                self._at(self._asked.pop(rank)[0], formed)
        for ctx in self.sim.contexts:
            ctx.join_pending = bool(self._asked)
