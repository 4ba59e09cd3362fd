"""Home's end of the lines to the ranks. One thread speaks with the job's store, so that whoever decides is never held
up by a store that does not answer, nor the ranks by an evaluation that takes its time."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator

from torch import Tensor

from ashl.errors import AshlError
from ashl.run import vectors
from ashl.run.reporter import RECORDS, news_of
from ashl.run.sealed import Sealed
from ashl.runtime.plane import first_line
from ashl.runtime.records import End, News, Record, Snapshot, UpdateShown, loads

POLL_S = 0.03
PULSE_S = 0.25  # between news
AHEAD = 2  # vectors that are taken out of the store before somebody wants them
HOME = -1  # whom news are from
LAST_WORD_S = 2.0  # for the news of the end


class Desk:
    """Takes in what the ranks say, and tells all of them the news."""

    def __init__(self, store: Sealed, num_ranks: int, num_params: int) -> None:
        now = time.monotonic()
        self.heard = dict.fromkeys(range(num_ranks), now)  # when something of each rank was taken out last ...
        self.drained = now  # ... and when all there was had been taken out
        self.answered = now  # when the store answered last
        self._store, self._num_params = store, num_params
        self.news = News()
        self._due, self._told = 0.0, threading.Event()
        self._came: deque[tuple[Record, Tensor | None]] = deque()
        self._fetched = self._taken = 0  # vectors
        self._error: Exception | None = None
        self._wake, self._closing = threading.Event(), False
        self._thread = threading.Thread(target=self._loop, daemon=True, name="desk")
        self._thread.start()

    @property
    def refused(self) -> int:
        """How many messages came that were not of this job."""
        return self._store.refused

    def received(self) -> Iterator[tuple[Record, Tensor | None]]:
        """What has come, with the model or update that belongs to it. Raises AshlError for what no rank would say, and
        where the store is gone."""
        while self._came:
            record, vector = self._came.popleft()
            self._taken += vector is not None
            yield record, vector
        if isinstance(self._error, AshlError):
            raise self._error
        if self._error is not None:
            raise AshlError(f"the job's store is gone: {first_line(self._error)}") from self._error

    def tell(self, news: News) -> None:
        """From now on these are the news."""
        self.news, self._due = news, 0.0
        self._wake.set()

    def close(self, end: End) -> None:
        """Let everybody know how it ended, for as long as the store takes that in."""
        self._told.clear()
        self._closing = True
        self.tell(self.news._replace(end=end))
        self._told.wait(LAST_WORD_S)

    def _loop(self) -> None:
        try:
            while not self._told.is_set():
                self._take_in()
                self._tell()
                self.answered = time.monotonic()
                self._wake.wait(POLL_S)
                self._wake.clear()
        except Exception as error:
            self._error = error
            self._told.set()

    def _take_in(self) -> None:
        while self._fetched - self._taken < AHEAD and not self._closing:
            item = self._store.pop(RECORDS)
            self.answered = time.monotonic()
            if item is None:
                self.drained = self.answered
                return
            sender, lines = item
            for line in lines.splitlines():
                record = loads(line)
                if record.rank != sender or sender not in self.heard:
                    raise AshlError(f"a record of rank {record.rank} came from rank {sender}")
                self.heard[sender] = time.monotonic()
                shown = isinstance(record, Snapshot | UpdateShown)
                vector = vectors.fetch(self._store, record, self._num_params) if shown else None
                self._fetched += vector is not None
                self._came.append((record, vector))

    def _tell(self) -> None:
        if time.monotonic() < self._due:
            return
        closing = self._closing  # before the news are read
        self._due = time.monotonic() + PULSE_S
        text = self.news.dumps().encode()
        for rank in self.heard:
            self._store.push(news_of(rank), HOME, text)
        if closing:
            self._told.set()
