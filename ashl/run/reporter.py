"""A rank's line to the monitor: records, heartbeats and snapshots out, news in: the order to stop, and how all ended.

One thread sends what has gathered a few times a second, through the job's key-value store, so that the experiment is
not disturbed and no message of the algorithm ever waits behind a record. Nothing else is shared between the ranks: no
folder, no machine.
"""

import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NoReturn

from torch import Tensor

from ashl.learn.learner import Learner
from ashl.run import checkpoint_upload, model_upload
from ashl.run.authenticated_store import AuthenticatedStore
from ashl.run.watchdog import EXIT_EVICTED, Watchdog, exit_process
from ashl.runtime.control_messages import ControlUpdate, End
from ashl.runtime.rank_checkpoint import Due, RankCheckpointWriter
from ashl.runtime.records import Alive, ModuleState, RankError, Record, Snapshot, UpdateShown, dumps
from ashl.runtime.sampling import Rounds
from ashl.runtime.transport import first_line
from ashl.size_only import Vector

EVERY_S = 0.2
CHUNK = 1_000_000  # characters in one item of the store, which refuses more than 8 MB
MAX_PENDING = (
    4  # snapshots (and updates) of a rank that wait here, and in the store; of more, all but the last are spared
)
STATES = 2  # of a worker's module that are on their way at a time
INCARNATIONS = 1 << 20  # between the numbers of two lives; more than there are ranks
RECORDS, END_SEEN = "records", "noted"  # queues of all ranks: their records; that they know of the end


class Reporter:
    """The observer of a rank in a process of its own."""

    def __init__(
        self, store: AuthenticatedStore, rank: int, rounds: Rounds, watchdog: Watchdog, incarnation: int = 0
    ) -> None:
        self.stopping: str | None = None
        self.scores: dict[str, float | None] | None = None
        self.end: End | None = None  # of the run, once it has one
        self.news = ControlUpdate()  # the last that came
        self.on_update: Callable[[ControlUpdate], None] = lambda news: (
            None
        )  # who else wants to know, in this one's thread
        self.rounds, self._rank, self._incarnation, self._broken = rounds, rank, incarnation, False
        self.on_evicted: Callable[[End], NoReturn] = exit_process  # where the run has gone on without this rank
        self.checkpoint_writer: RankCheckpointWriter | None = None  # of this rank's part of checkpoints
        self.make_heartbeat: Callable[[], Record] = lambda: Alive(rank)
        self.learner: Learner | None = None  # whose module's state is shown
        self._pending_states: deque[tuple[Any, bool]] = deque()
        self._store, self._watch = store, watchdog
        self._outbox: deque[tuple[Record, Tensor | None]] = deque()
        self._uploaded: Counter[str] = Counter()  # vectors by queue, and how many home has taken out of each
        self._consumed: dict[str, int] = {}
        self._pending: dict[type, int] = {Snapshot: 0, UpdateShown: 0}  # among them, with their vectors
        self._lock, self._flush_lock = threading.Lock(), threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True, name="reporter")
        self._thread.start()

    def emit(self, record: Record) -> None:
        self._outbox.append((record, None))

    def snapshot(self, record: Snapshot | UpdateShown, vector: Vector | None) -> None:
        if not isinstance(vector, Tensor):
            self._outbox.append((record, None))
            return
        with self._lock:
            if self._pending[type(record)] >= MAX_PENDING and not is_last(record):
                return
            self._pending[type(record)] += 1
        self._outbox.append((record, vector))

    def show_last_state(self, state: Any) -> None:
        """Send what forward passes have changed of this worker's module in the end; nothing older is sent after it."""
        with self._flush_lock:
            self.learner = None
            self._pending_states.append((state, True))

    def _upload_states(self) -> Iterator[str]:
        """Send what is to be shown, where home has kept up, and ask for the next; yields the records."""
        queue = checkpoint_upload.state_queue(self._rank, self._incarnation)
        if self.learner is not None:
            if self.learner.shown is not None:
                self._pending_states.append((self.learner.shown, False))
            self.learner.shown = None
            self.learner.wants_state = True
        while self._pending_states:
            state, last = self._pending_states.popleft()
            if last or self._uploaded[queue] - self._consumed.get(queue, 0) < STATES:
                self._uploaded[queue] += 1
                yield dumps(
                    ModuleState(
                        self._rank,
                        checkpoint_upload.upload_state(self._store, self._rank, self._incarnation, state),
                        last,
                    )
                )

    def close(self) -> None:
        """Everything is sent when this returns."""
        self._end.set()
        self._thread.join()
        if not self._broken:
            try:
                self._flush()
            except Exception as error:
                self._fail(error)

    def await_run_end(self, limit_s: float = float("inf")) -> End | None:
        """How the run has ended, once home says so; None where it does not within that time. To be asked at last."""
        until = time.monotonic() + limit_s
        with suppress(RuntimeError):  # the store is gone, and whoever kept it
            while self.end is None and time.monotonic() < until:
                self._listen()
                time.sleep(0.02)
        return self.end

    def _loop(self) -> None:
        try:
            while not self._end.wait(EVERY_S):
                self._flush()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Nothing can be recorded of this rank any longer: that is why the run ends, not that it was not heard of."""
        self._broken = True
        text = f"its records cannot be sent: {type(error).__name__}: {first_line(error)}"
        try:
            self._push([dumps(RankError(self._rank, text, consequence=False))])
        except RuntimeError:
            exit_process(End(1, f"the job's store at {self._store.address} is gone: {first_line(error)}"))
        with suppress(OSError):  # the rank's log may be on a full disk
            traceback.print_exception(error)

    def _flush(self) -> None:
        with self._flush_lock:
            lines = [dumps(self.make_heartbeat()), *self._upload_states()]
            size = 0
            while self._outbox:
                record, vector = self._outbox.popleft()
                line = record if vector is None else self._upload_vector(record, vector)
                if line is None:
                    continue
                lines.append(dumps(line))
                size += len(lines[-1])
                if size > CHUNK:
                    self._push(lines)
                    lines, size = [], 0
            self._push(lines)
            self._listen()

    def _push(self, lines: list[str]) -> None:
        if lines:
            self._store.push(RECORDS, sender_number(self._rank, self._incarnation), "\n".join(lines).encode())

    def _listen(self) -> None:
        """Take in the news. Where the run has failed, this process ends here, whatever it is doing."""
        while item := self._store.pop(control_queue(self._rank, self._incarnation)):
            news = ControlUpdate.loads(item[1])
            self._watch.record_controller_message()
            self.stopping = self.stopping or news.stopping
            self.scores, self.end, self._consumed = news.scores, news.end, news.taken or {}
            self.news = news
            self.on_update(news)
            if news.end:
                self._store.push(END_SEEN, sender_number(self._rank, self._incarnation), b"")
            if self.checkpoint_writer is not None and news.wanted is not None:
                self.checkpoint_writer.asked = Due(*news.wanted)
            if news.end and news.end.code:
                (self.on_evicted if news.end.code == EXIT_EVICTED else exit_process)(news.end)
        self._watch.record_store_answer()

    def _upload_vector(self, record: Record, vector: Tensor) -> Record | None:
        """Send the vector ahead of its record; None where the monitor has not kept up and this one can be spared."""
        assert isinstance(record, Snapshot | UpdateShown)
        with self._lock:
            self._pending[type(record)] -= 1
        queue = model_upload.vector_queue(record, self._incarnation)
        if not is_last(record) and self._uploaded[queue] - self._consumed.get(queue, 0) >= MAX_PENDING:
            return None
        self._uploaded[queue] += 1

        def send_heartbeat() -> None:  # a large model takes its time, and is not late
            self._push([dumps(self.make_heartbeat())])
            self._listen()

        return record._replace(nbytes=model_upload.upload_vector(self._store, queue, record, vector, send_heartbeat))


def is_last(record: Record) -> bool:
    return isinstance(record, Snapshot) and record.final


def control_queue(rank: int, incarnation: int) -> str:
    """The queue of what home tells a rank in this life."""
    return f"news/{rank}/{incarnation}"


def sender_number(rank: int, incarnation: int) -> int:
    """By this number the store knows who says something: a worker that comes back is another one than before."""
    return incarnation * INCARNATIONS + rank


def split_sender(number: int) -> tuple[int, int]:
    """Rank and life of a sender."""
    incarnation, rank = divmod(number, INCARNATIONS)
    return rank, incarnation
