"""A rank's view of which peers are members: it applies the controller's control updates, that is,
it disconnects failed peers and connects rejoining ones.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

from ashl.run.authenticated_store import AuthenticatedStore
from ashl.runtime.process import TorchKernel
from ashl.runtime.records import ControlUpdate
from ashl.runtime.rendezvous import admit_worker

logger = logging.getLogger(__name__)


class MembershipListener:
    """Applies membership changes to this rank's connections, in the reporter's thread."""

    def __init__(
        self,
        kernel: TorchKernel,
        rank: int,
        incarnation: int,
        peers: Iterable[int],
        store: AuthenticatedStore,
        regroups: bool = False,
        is_worker: bool = True,
    ) -> None:
        """Args: incarnation, of this rank; regroups, True if a failure or a rejoin begins a new
        epoch.
        """
        self._kernel = kernel
        self._rank = rank
        self._incarnation = incarnation
        self._store = store
        self._regroups = regroups
        self._is_worker = is_worker
        # the latest incarnation of each peer that this rank has connected or is connecting
        self._incarnations = dict.fromkeys(peers, 0)
        self._failed: dict[int, int] = {}  # the latest failed incarnation of each failed peer
        self._lock = threading.Lock()

    @property
    def failed_ranks(self) -> set[int]:
        """Return the ranks whose latest incarnation failed."""
        with self._lock:
            return {
                rank
                for rank, incarnation in self._failed.items()
                if incarnation >= self._incarnations.get(rank, 0)
            }

    def on_membership(self, update: ControlUpdate) -> None:
        """Begin a new epoch; or disconnect newly failed peers, and connect a peer that is ready to
        rejoin.

        Does nothing before the kernel has connections: the controller repeats its updates.
        """
        if self._regroups:
            return self._on_epoch(update)
        if not self._kernel.has_started:
            return
        previous, failed = self._failed, dict(update.failed)
        with self._lock:
            self._failed = failed
        for rank, incarnation in failed.items():
            if incarnation >= self._incarnations.get(rank, 0) and previous.get(rank) != incarnation:
                logger.warning(
                    "worker %d, incarnation %d, failed; continues without it", rank, incarnation
                )
                self._kernel.mark_peer_failed(rank, "the run continues without it")
        for rank, incarnation in update.ready:
            if incarnation > self._incarnations.get(rank, incarnation):
                with self._lock:
                    self._incarnations[rank] = incarnation
                threading.Thread(
                    target=self._connect_rejoined,
                    args=(rank, incarnation),
                    daemon=True,
                    name=f"connect-{rank}",
                ).start()

    def _on_epoch(self, update: ControlUpdate) -> None:
        """Begin the epoch of this update, if this incarnation is a member."""
        with self._lock:
            self._failed = dict(update.failed)
        epoch = update.epoch
        known = dict(zip(epoch.workers, epoch.incarnations, strict=True))
        if not self._is_worker or known.get(self._rank) == self._incarnation:
            self._kernel.begin_epoch(epoch)

    def _connect_rejoined(self, rank: int, incarnation: int) -> None:
        """Connect to a rejoining worker, in a thread of its own."""
        group = admit_worker(self._store, self._rank, rank, incarnation, self._kernel.now_ns)
        self._kernel.connect_peer(rank, incarnation, group)
        if rank in self.failed_ranks:  # it has failed again in the meantime
            self._kernel.mark_peer_failed(rank, "the run continues without it")
        logger.info("worker %d rejoined as incarnation %d; is connected to it", rank, incarnation)
