"""A rank's roll of who takes part, as home calls it: who is gone is given up, and who comes (back) is let in."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from ashl.run.authenticated_store import AuthenticatedStore
from ashl.runtime.control_messages import ControlUpdate
from ashl.runtime.process import TorchKernel
from ashl.runtime.regroup_consensus import RegroupConsensus
from ashl.runtime.rendezvous import acquainted, let_in


class MembershipListener:
    """Hears the news in the reporter's thread, and acts on what they say of this rank's peers."""

    def __init__(
        self,
        kernel: TorchKernel,
        rank: int,
        incarnation: int,
        peers: Mapping[int, int],
        store: AuthenticatedStore,
        consensus: RegroupConsensus | None,
    ) -> None:
        """`life` is this rank's, `peers` say that of each."""
        self._kernel, self._rank, self._incarnation, self._store, self._consensus = (
            kernel,
            rank,
            incarnation,
            store,
            consensus,
        )
        self._incarnations = dict(peers)  # the last one of each that was let in
        self._failed: dict[int, int] = {}  # the last one of each that is over
        self._lock = threading.Lock()

    @property
    def failed_ranks(self) -> set[int]:
        """Who is not there, and not waited for."""
        with self._lock:
            return {
                rank for rank, incarnation in self._failed.items() if incarnation >= self._incarnations.get(rank, 0)
            }

    def on_membership(self, news: ControlUpdate) -> None:
        if not self._kernel.started:
            return  # there are no links yet, and all is said again
        previous, lost = self._failed, dict(news.lost)
        with self._lock:
            self._failed = lost
        for rank, incarnation in lost.items():
            if incarnation >= self._incarnations.get(rank, 0) and previous.get(rank) != incarnation:
                self._kernel.lose(rank, "the run goes on without it")
                if self._consensus is not None:
                    self._consensus.lose(rank, incarnation)
        for rank, incarnation in news.ready:
            if incarnation > self._incarnations.get(rank, incarnation):
                with self._lock:
                    self._incarnations[rank] = incarnation
                threading.Thread(
                    target=self._connect_rejoined, args=(rank, incarnation), daemon=True, name=f"let_in-{rank}"
                ).start()

    def _connect_rejoined(self, rank: int, incarnation: int) -> None:
        store = self._store.another()
        group = let_in(store, self._rank, self._incarnation, rank, incarnation, self._kernel.clock_ns)
        self._kernel.meet(rank, incarnation, group)
        if self._consensus is not None:
            self._consensus.meet(rank, incarnation)
            self._kernel.ctx.join_pending = True
        if rank in self.failed_ranks:  # in the meantime
            self._kernel.lose(rank, "the run goes on without it")
        acquainted(store, self._rank, rank, incarnation)
