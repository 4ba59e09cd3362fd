"""A rank's roll of who takes part, as home calls it: who is gone is given up, and who comes (back) is let in."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from ashl.run.sealed import Sealed
from ashl.runtime.agreement import Agreement
from ashl.runtime.meeting import acquainted, let_in
from ashl.runtime.news import News
from ashl.runtime.process import TorchKernel


class Roll:
    """Hears the news in the reporter's thread, and acts on what they say of this rank's peers."""

    def __init__(
        self,
        kernel: TorchKernel,
        rank: int,
        life: int,
        peers: Mapping[int, int],
        store: Sealed,
        agreement: Agreement | None,
    ) -> None:
        """`life` is this rank's, `peers` say that of each."""
        self._kernel, self._rank, self._life, self._store, self._agreement = kernel, rank, life, store, agreement
        self._lives = dict(peers)  # the last one of each that was let in
        self._gone: dict[int, int] = {}  # the last one of each that is over
        self._lock = threading.Lock()

    @property
    def away(self) -> set[int]:
        """Who is not there, and not waited for."""
        with self._lock:
            return {rank for rank, life in self._gone.items() if life >= self._lives.get(rank, 0)}

    def hear(self, news: News) -> None:
        if not self._kernel.started:
            return  # there are no links yet, and all is said again
        before, lost = self._gone, dict(news.lost)
        with self._lock:
            self._gone = lost
        for rank, life in lost.items():
            if life >= self._lives.get(rank, 0) and before.get(rank) != life:
                self._kernel.lose(rank, "the run goes on without it")
                if self._agreement is not None:
                    self._agreement.lose(rank, life)
        for rank, life in news.ready:
            if life > self._lives.get(rank, life):
                with self._lock:
                    self._lives[rank] = life
                threading.Thread(target=self._let_in, args=(rank, life), daemon=True, name=f"let_in-{rank}").start()

    def _let_in(self, rank: int, life: int) -> None:
        store = self._store.another()
        group = let_in(store, self._rank, self._life, rank, life, self._kernel.clock_ns)
        self._kernel.meet(rank, life, group)
        if self._agreement is not None:
            self._agreement.meet(rank, life)
            self._kernel.ctx.join_pending = True
        if rank in self.away:  # in the meantime
            self._kernel.lose(rank, "the run goes on without it")
        acquainted(store, self._rank, rank, life)
