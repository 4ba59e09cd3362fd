"""Membership at a rank: apply the controller's control updates to its connections.

Peers are the ranks that this rank exchanges messages with. In a run whose workers regroup, a
failure or a rejoin begins a new epoch with connections of its own. In any other run that tolerates
failures, the rank disconnects failed peers, and connects a rejoining one by a group of two.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

from ashl.run.authenticated_store import StoreClient
from ashl.runtime.process import TorchKernel
from ashl.runtime.records import ControlUpdate
from ashl.runtime.rendezvous import admit_worker
from ashl.runtime.transport import first_line

logger = logging.getLogger(__name__)


class MembershipListener:
    """Applies membership changes to this rank's connections, in the reporter's thread.

    Threads: others read `failed_ranks`. Single operations on dicts need no lock.
    """

    def __init__(
        self,
        kernel: TorchKernel,
        peers: Iterable[int],
        store: StoreClient,
        *,
        regroups: bool = False,
        is_worker: bool = True,
    ) -> None:
        """Set up the listener of the kernel's rank; no peer has failed.

        Args: peers, ranks that this rank exchanges messages with; regroups, True if a failure or a
        rejoin begins a new epoch.
        """
        self._kernel = kernel
        self._store = store
        self._regroups = regroups
        self._is_worker = is_worker
        # the latest incarnation of each peer that this rank has connected or is connecting
        self._incarnations = dict.fromkeys(peers, 0)
        # the latest failed incarnation of each failed worker, also of those that are no peers
        self._failed: dict[int, int] = {}
        self._has_ended = False  # True once the run has ended

    @property
    def failed_ranks(self) -> set[int]:
        """Return the ranks whose latest incarnation failed."""
        return {
            rank
            for rank, incarnation in self._failed.items()
            if incarnation >= self._incarnations.get(rank, 0)
        }

    def on_membership(self, update: ControlUpdate) -> None:
        """Begin a new epoch if the run regroups; otherwise disconnect newly failed peers, and
        connect peers that are ready to rejoin.

        Without epochs it does nothing before the kernel has connections. The controller repeats
        its updates, so nothing is missed, and each change is applied once.
        """
        self._has_ended = update.end is not None
        if self._regroups:
            return self._on_epoch(update)
        if not self._kernel.has_started:
            return
        previous, failed = self._failed, dict(update.failed)
        self._failed = failed
        for rank, incarnation in failed.items():
            if incarnation >= self._incarnations.get(rank, 0) and previous.get(rank) != incarnation:
                logger.warning(
                    "worker %d, incarnation %d, failed; continues without it", rank, incarnation
                )
                self._kernel.mark_peer_failed(rank, "the run continues without it")
        for rank, incarnation in update.ready:
            if incarnation > self._incarnations.get(rank, incarnation):
                self._incarnations[rank] = incarnation
                threading.Thread(
                    target=self._connect_rejoined,
                    args=(rank, incarnation),
                    daemon=True,
                    name=f"connect-{rank}",
                ).start()

    def _on_epoch(self, update: ControlUpdate) -> None:
        """Begin the epoch of this update, unless this rank is a worker and this incarnation is no
        member. The kernel ignores an epoch that it knows already.
        """
        self._failed = dict(update.failed)
        epoch, own = update.epoch, self._kernel.ctx
        members = dict(zip(epoch.workers, epoch.incarnations, strict=True))
        if not self._is_worker or members.get(own.rank) == own.incarnation:
            self._kernel.begin_epoch(epoch)
        self._kernel.supervised_s = update.supervised_s  # last, so that the epoch comes first

    def _connect_rejoined(self, rank: int, incarnation: int) -> None:
        """Connect to a rejoining worker, in a thread of its own: it blocks until the worker is
        there, has failed, or the run has ended.
        """

        def is_over() -> bool:
            return self._has_ended or self._failed.get(rank, -1) >= incarnation

        own, group, why = self._kernel.ctx.rank, None, "it failed, or the run has ended"
        try:
            group = admit_worker(self._store, own, rank, incarnation, self._kernel.now_ns, is_over)
        except RuntimeError as error:
            why = first_line(error)
        if group is None:
            logger.warning(
                "worker %d, incarnation %d, does not connect: %s", rank, incarnation, why
            )
            return
        self._kernel.connect_peer(rank, incarnation, group)
        if rank in self.failed_ranks:  # it has failed again in the meantime
            self._kernel.mark_peer_failed(rank, "the run continues without it")
        logger.info("worker %d rejoined as incarnation %d; is connected to it", rank, incarnation)
