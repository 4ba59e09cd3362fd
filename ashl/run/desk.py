"""Home's end of the lines to the ranks. One thread speaks with the job's store, so that whoever decides is never held
up by a store that does not answer, nor the ranks by an evaluation that takes its time."""

import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress

from torch import Tensor

from ashl.errors import AshlError
from ashl.run import parts, vectors
from ashl.run.doors import ASKS, Answer, Ask, answers_to
from ashl.run.reporter import NOTED, RECORDS, news_of, sender_of
from ashl.run.sealed import Sealed
from ashl.run.watch import AWAKE_S
from ashl.runtime.news import End, News
from ashl.runtime.plane import first_line
from ashl.runtime.records import Kept, ModuleState, Record, Snapshot, UpdateShown, loads

POLL_S = 0.03
PULSE_S = 0.25  # between news
AHEAD = 2  # vectors that are taken out of the store before somebody wants them
HOME = -1  # whom news are from
LAST_WORD_S = 1.5  # for news that the run has failed
PATIENCE_S = 5.0  # for those that it is over; after Ctrl-C: for the ranks to leave in order


class Desk:
    """Takes in what the ranks say, and tells all of them the news."""

    def __init__(self, store: Sealed, num_ranks: int, num_params: int, held: Mapping[int, int] | None = None) -> None:
        """`held`: of ranks that hold a piece of the model, how many parameters that has."""
        now = time.monotonic()
        self.heard = dict.fromkeys(range(num_ranks), now)  # when something of each rank was taken out last ...
        self.lives = dict.fromkeys(range(num_ranks), 0)  # of each rank, the one that is listened to
        self.away: set[int] = set()  # of whom nobody is there
        self.drained = now  # ... and when all there was had been taken out
        self.answered = now  # when the store answered last
        self.resumed = 0.0  # when this process went on after it was stopped, as by Ctrl-Z, the ranks with it perhaps
        self.store = f"the job's store at {store.address}"
        self._store, self._sizes = store, dict.fromkeys(range(num_ranks), num_params) | dict(held or {})
        self.news = self._sent = News()
        self._due = 0.0
        self._letters: deque[tuple[str, bytes]] = deque()  # to be pushed
        self.asks: deque[tuple[int, Ask]] = deque()  # of newcomers, each by its number
        self._came: deque[tuple[Record, Tensor | None]] = deque()
        self._fetched = self._taken = 0  # vectors
        self._from: Counter[str] = Counter()  # how many of them by queue
        self._error: Exception | None = None
        self._wake, self._over = threading.Event(), False
        self._missing: set[int] | None = None  # who has yet to take note of the end, once there is one
        self._thread = threading.Thread(target=self._loop, daemon=True, name="desk")
        self._thread.start()

    @property
    def refused(self) -> int:
        """How many messages came that were not of this job."""
        return self._store.refused

    def received(self) -> Iterator[tuple[Record, Tensor | None]]:
        """What has come, with the model, update or part of a checkpoint that belongs to it. Raises AshlError for what
        no rank would say, and where the store is gone."""
        while self._came:
            record, vector = self._came.popleft()
            self._taken += vector is not None
            yield record, vector
        if isinstance(self._error, AshlError):
            raise self._error
        if self._error is not None:
            raise AshlError(f"{self.store} is gone: {first_line(self._error)}") from self._error

    def publish(self, news: News) -> None:
        """From now on these are the news."""
        self.news = news
        self._wake.set()

    def drop(self, rank: int, end: End) -> None:
        """Tell the present life of a rank, whenever it listens again, that it is over."""
        self._letters.append((news_of(rank, self.lives[rank]), News(end=end).dumps().encode()))
        self._wake.set()

    def close(self, end: End, here: Collection[int]) -> None:
        """Let everybody know how it ended, and wait for a while until those who do not run here have taken note: the
        store may end with this process. Where the run has failed, whoever is silent is not waited for."""
        quiet = {rank for rank, at in self.heard.items() if end.code and self.drained - at > LAST_WORD_S}
        self._missing = {*self.heard} - {*here} - quiet - self.away
        self.publish(self.news._replace(end=end))
        self._thread.join(LAST_WORD_S if end.code else PATIENCE_S)
        self._missing = set()

    def _loop(self) -> None:
        try:
            last = time.monotonic()
            while not self._over:
                now = time.monotonic()
                if now - last > AWAKE_S:
                    self._forgive(now, now - last)
                last = now
                if self._missing is None:
                    self._take_in()
                self._send()
                self.answered = time.monotonic()
                self._wake.wait(POLL_S)
                self._wake.clear()
        except Exception as error:
            self._error = error

    def _forgive(self, now: float, stopped_s: float) -> None:
        """While this process was stopped it could hear nobody: no rank counts as silent for that."""
        self.resumed = now
        for rank in self.heard:
            self.heard[rank] += stopped_s

    def answer(self, number: int, answer: Answer) -> None:
        """To a newcomer."""
        self._letters.append((answers_to(number), answer.dumps()))
        self._wake.set()

    def _take_in(self) -> None:
        if item := self._store.pop(ASKS):
            with suppress(AshlError, ValueError):  # whoever it is has another version, and knows it
                self.asks.append((item[0], Ask.loads(item[1])))
        while self._fetched - self._taken < AHEAD:
            item = self._store.pop(RECORDS)
            self.answered = time.monotonic()
            if item is None:
                self.drained = self.answered
                return
            (rank, life), lines = sender_of(item[0]), item[1]
            for line in lines.splitlines():
                record = loads(line)
                if record.rank != rank or rank not in self.heard:
                    raise AshlError(f"a record of rank {record.rank} came from rank {rank}")
                if life != self.lives[rank]:
                    break  # it does not know yet that it was dropped
                self.heard[rank] = time.monotonic()
                vector = None
                if isinstance(record, Snapshot | UpdateShown):
                    queue = vectors.queue_of(record, life)
                    vector = vectors.fetch(self._store, queue, record, self._sizes[rank])
                    self._fetched += vector is not None
                    self._from[queue] += vector is not None
                elif isinstance(record, Kept):
                    vector = parts.received(self._store, record)
                    self._fetched += vector is not None
                elif isinstance(record, ModuleState):
                    vector = parts.received_state(self._store, record, life)
                    self._fetched += 1
                    self._from[parts.state_of(rank, life)] += 1
                self._came.append((record, vector))

    def _send(self) -> None:
        while self._missing and (item := self._store.pop(NOTED)):
            rank, life = sender_of(item[0])
            if life == self.lives.get(rank):  # and not that it was dropped
                self._missing.discard(rank)
        while self._letters:
            queue, text = self._letters.popleft()
            self._store.push(queue, HOME, text)
        news = self.news._replace(taken=dict(self._from))
        if news != self._sent or time.monotonic() > self._due:
            self._sent, self._due = news, time.monotonic() + PULSE_S
            text = news.dumps().encode()
            for rank in self.heard.keys() - self.away:
                self._store.push(news_of(rank, self.lives[rank]), HOME, text)
        self._over = bool(self._sent.end and not self._missing)
