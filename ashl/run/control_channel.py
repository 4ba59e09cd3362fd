"""Home's end of the lines to the ranks. One thread speaks with the job's store, so that whoever decides is never held
up by a store that does not answer, nor the ranks by an evaluation that takes its time."""

import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress

from torch import Tensor

from ashl.errors import AshlError
from ashl.run import checkpoint_upload, model_upload
from ashl.run.authenticated_store import AuthenticatedStore
from ashl.run.join_endpoint import JOIN_REQUESTS, JoinAnswer, JoinRequest, answer_queue
from ashl.run.reporter import END_SEEN, RECORDS, control_queue, split_sender
from ashl.run.watchdog import AWAKE_S
from ashl.runtime.control_messages import ControlUpdate, End
from ashl.runtime.records import CheckpointPartSaved, ModuleState, Record, Snapshot, UpdateShown, loads
from ashl.runtime.transport import first_line

POLL_S = 0.03
PULSE_S = 0.25  # between news
PREFETCH = 2  # vectors that are taken out of the store before somebody wants them
CONTROLLER = -1  # whom news are from
FINAL_SIGNAL_S = 1.5  # for news that the run has failed
PATIENCE_S = 5.0  # for those that it is over; after Ctrl-C: for the ranks to leave in order


class ControlChannel:
    """Takes in what the ranks say, and tells all of them the news."""

    def __init__(
        self, store: AuthenticatedStore, num_ranks: int, num_params: int, shard_sizes: Mapping[int, int] | None = None
    ) -> None:
        """`held`: of ranks that hold a piece of the model, how many parameters that has."""
        now = time.monotonic()
        self.last_heard_s = dict.fromkeys(range(num_ranks), now)  # when something of each rank was taken out last ...
        self.incarnations = dict.fromkeys(range(num_ranks), 0)  # of each rank, the one that is listened to
        self.absent: set[int] = set()  # of whom nobody is there
        self.drained_s = now  # ... and when all there was had been taken out
        self.store_answered_s = now  # when the store answered last
        self.resumed_s = 0.0  # when this process went on after it was stopped, as by Ctrl-Z, the ranks with it perhaps
        self.store = f"the job's store at {store.address}"
        self._store, self._sizes = store, dict.fromkeys(range(num_ranks), num_params) | dict(shard_sizes or {})
        self.news = self._published = ControlUpdate()
        self._due = 0.0
        self._outbox: deque[tuple[str, bytes]] = deque()  # to be pushed
        self.join_requests: deque[tuple[int, JoinRequest]] = deque()  # of newcomers, each by its number
        self._inbox: deque[tuple[Record, Tensor | None]] = deque()
        self._prefetched = self._consumed = 0  # vectors
        self._consumed_from: Counter[str] = Counter()  # how many of them by queue
        self._error: Exception | None = None
        self._wake, self._over = threading.Event(), False
        self._unacknowledged: set[int] | None = None  # who has yet to take note of the end, once there is one
        self._thread = threading.Thread(target=self._loop, daemon=True, name="control_channel")
        self._thread.start()

    @property
    def refused(self) -> int:
        """How many messages came that were not of this job."""
        return self._store.refused

    def receive_records(self) -> Iterator[tuple[Record, Tensor | None]]:
        """What has come, with the model, update or part of a checkpoint that belongs to it. Raises AshlError for what
        no rank would say, and where the store is gone."""
        while self._inbox:
            record, vector = self._inbox.popleft()
            self._consumed += vector is not None
            yield record, vector
        if isinstance(self._error, AshlError):
            raise self._error
        if self._error is not None:
            raise AshlError(f"{self.store} is gone: {first_line(self._error)}") from self._error

    def publish(self, news: ControlUpdate) -> None:
        """From now on these are the news."""
        self.news = news
        self._wake.set()

    def evict(self, rank: int, end: End) -> None:
        """Tell the present life of a rank, whenever it listens again, that it is over."""
        self._outbox.append((control_queue(rank, self.incarnations[rank]), ControlUpdate(end=end).dumps().encode()))
        self._wake.set()

    def close(self, end: End, here: Collection[int]) -> None:
        """Let everybody know how it ended, and wait for a while until those who do not run here have taken note: the
        store may end with this process. Where the run has failed, whoever is silent is not waited for."""
        quiet = {rank for rank, at in self.last_heard_s.items() if end.code and self.drained_s - at > FINAL_SIGNAL_S}
        self._unacknowledged = {*self.last_heard_s} - {*here} - quiet - self.absent
        self.publish(self.news._replace(end=end))
        self._thread.join(FINAL_SIGNAL_S if end.code else PATIENCE_S)
        self._unacknowledged = set()

    def _loop(self) -> None:
        try:
            last = time.monotonic()
            while not self._over:
                now = time.monotonic()
                if now - last > AWAKE_S:
                    self._discount_stop(now, now - last)
                last = now
                if self._unacknowledged is None:
                    self._read_store()
                self._write_store()
                self.store_answered_s = time.monotonic()
                self._wake.wait(POLL_S)
                self._wake.clear()
        except Exception as error:
            self._error = error

    def _discount_stop(self, now: float, stopped_s: float) -> None:
        """While this process was stopped it could hear nobody: no rank counts as silent for that."""
        self.resumed_s = now
        for rank in self.last_heard_s:
            self.last_heard_s[rank] += stopped_s

    def send_join_answer(self, number: int, send_join_answer: JoinAnswer) -> None:
        """To a newcomer."""
        self._outbox.append((answer_queue(number), send_join_answer.dumps()))
        self._wake.set()

    def _read_store(self) -> None:
        if item := self._store.pop(JOIN_REQUESTS):
            with suppress(AshlError, ValueError):  # whoever it is has another version, and knows it
                self.join_requests.append((item[0], JoinRequest.loads(item[1])))
        while self._prefetched - self._consumed < PREFETCH:
            item = self._store.pop(RECORDS)
            self.store_answered_s = time.monotonic()
            if item is None:
                self.drained_s = self.store_answered_s
                return
            (rank, incarnation), lines = split_sender(item[0]), item[1]
            for line in lines.splitlines():
                record = loads(line)
                if record.rank != rank or rank not in self.last_heard_s:
                    raise AshlError(f"a record of rank {record.rank} came from rank {rank}")
                if incarnation != self.incarnations[rank]:
                    break  # it does not know yet that it was dropped
                self.last_heard_s[rank] = time.monotonic()
                vector = None
                if isinstance(record, Snapshot | UpdateShown):
                    queue = model_upload.vector_queue(record, incarnation)
                    vector = model_upload.receive_vector(self._store, queue, record, self._sizes[rank])
                    self._prefetched += vector is not None
                    self._consumed_from[queue] += vector is not None
                elif isinstance(record, CheckpointPartSaved):
                    vector = checkpoint_upload.receive_checkpoint_part(self._store, record)
                    self._prefetched += vector is not None
                elif isinstance(record, ModuleState):
                    vector = checkpoint_upload.receive_state(self._store, record, incarnation)
                    self._prefetched += 1
                    self._consumed_from[checkpoint_upload.state_queue(rank, incarnation)] += 1
                self._inbox.append((record, vector))

    def _write_store(self) -> None:
        while self._unacknowledged and (item := self._store.pop(END_SEEN)):
            rank, incarnation = split_sender(item[0])
            if incarnation == self.incarnations.get(rank):  # and not that it was dropped
                self._unacknowledged.discard(rank)
        while self._outbox:
            queue, text = self._outbox.popleft()
            self._store.push(queue, CONTROLLER, text)
        news = self.news._replace(taken=dict(self._consumed_from))
        if news != self._published or time.monotonic() > self._due:
            self._published, self._due = news, time.monotonic() + PULSE_S
            text = news.dumps().encode()
            for rank in self.last_heard_s.keys() - self.absent:
                self._store.push(control_queue(rank, self.incarnations[rank]), CONTROLLER, text)
        self._over = bool(self._published.end and not self._unacknowledged)
