"""Messages between the controller and the ranks of a run, through the job's key-value store.

Records, heartbeats and models flow from each rank (`Reporter`) to the controller
(`ControlChannel`). Control updates flow back: the request to stop, which workers failed or
rejoined, which checkpoint is due, and how the run ended. Each side has one thread that speaks with
the store, so neither training nor an evaluation waits for a store that does not answer. A
(re)joining process on the same machine finds the store by the run's join endpoint, and asks for the
place of a failed worker.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ashl import __version__
from ashl.errors import AshlError, UsageError, parsed
from ashl.learn.learner import Learner
from ashl.run import uploads
from ashl.run.authenticated_store import AuthenticatedStore, Secret
from ashl.run.membership_listener import AWAKE_S, Watchdog, exit_process
from ashl.run.process_setup import EXIT_EVICTED
from ashl.runtime.control_messages import ControlUpdate, End
from ashl.runtime.machine import machine
from ashl.runtime.rank_checkpoint import Due, RankCheckpointWriter
from ashl.runtime.records import (
    Alive,
    CheckpointPartSaved,
    ModuleState,
    PeerUnreachable,
    PlanMade,
    RankError,
    Record,
    Replan,
    Rounds,
    Snapshot,
    StageBoundary,
    StageEnd,
    Text,
    UpdateShown,
    dumps,
    loads,
    validate,
)
from ashl.runtime.transport import first_line
from ashl.size_only import Vector

POLL_S = 0.03
PULSE_S = 0.25  # between news
PREFETCH = 2  # vectors that are taken out of the store before somebody wants them
CONTROLLER = -1  # whom news are from
FINAL_SIGNAL_S = 1.5  # for news that the run has failed
PATIENCE_S = 5.0  # for those that it is over; after Ctrl-C: for the ranks to leave in order


logger = logging.getLogger(__name__)


class ControlChannel:
    """The controller's end: reads the records of all ranks, and publishes control updates
    to them.
    """

    def __init__(
        self,
        store: AuthenticatedStore,
        num_ranks: int,
        num_params: int,
        shard_sizes: Mapping[int, int] | None = None,
    ) -> None:
        """`held`: of ranks that hold a piece of the model, how many parameters that has."""
        now = time.monotonic()
        self.last_heard_s = dict.fromkeys(
            range(num_ranks), now
        )  # when something of each rank was taken out last ...
        self.incarnations = dict.fromkeys(
            range(num_ranks), 0
        )  # of each rank, the one that is listened to
        self.absent: set[int] = set()  # of whom nobody is there
        self.drained_s = now  # ... and when all there was had been taken out
        self.store_answered_s = now  # when the store answered last
        # when this process went on after it was stopped, as by Ctrl-Z, the ranks with it perhaps
        self.resumed_s = 0.0
        self.store = f"the job's store at {store.address}"
        self._store, self._sizes = (
            store,
            dict.fromkeys(range(num_ranks), num_params) | dict(shard_sizes or {}),
        )
        self.control_update = self._published = ControlUpdate()
        self._due = 0.0
        self._outbox: deque[tuple[str, bytes]] = deque()  # to be pushed
        self.join_requests: deque[tuple[int, JoinRequest]] = (
            deque()
        )  # of newcomers, each by its number
        self._inbox: deque[tuple[Record, Tensor | None]] = deque()
        self._prefetched = self._consumed = 0  # vectors
        self._consumed_from: Counter[str] = Counter()  # how many of them by queue
        self._error: Exception | None = None
        self._wake, self._over = threading.Event(), False
        self._unacknowledged: set[int] | None = (
            None  # who has yet to take note of the end, once there is one
        )
        self._thread = threading.Thread(target=self._loop, daemon=True, name="control_channel")
        self._thread.start()

    @property
    def refused(self) -> int:
        """Return how many messages of untrusted clients were rejected."""
        return self._store.refused

    def receive_records(self) -> Iterator[tuple[Record, Tensor | None]]:
        """What has come, with the model, update or part of a checkpoint that belongs to it. Raises
        AshlError for what no rank would say, and where the store is gone.
        """
        while self._inbox:
            record, vector = self._inbox.popleft()
            self._consumed += vector is not None
            yield record, vector
        if isinstance(self._error, AshlError):
            raise self._error
        if self._error is not None:
            raise AshlError(f"{self.store} is gone: {first_line(self._error)}") from self._error

    def publish(self, update: ControlUpdate) -> None:
        """Publish this control update to all ranks, again and again until another one
        replaces it.
        """
        self.control_update = update
        self._wake.set()

    def evict(self, rank: int, end: End) -> None:
        """Tell the present incarnation of a rank, when it next reads, that it is evicted."""
        self._outbox.append(
            (control_queue(rank, self.incarnations[rank]), ControlUpdate(end=end).dumps().encode())
        )
        self._wake.set()

    def close(self, end: End, here: Collection[int]) -> None:
        """Let everybody know how it ended, and wait for a while until those who do not run here
        have taken note: the store may end with this process. Where the run has failed, whoever is
        silent is not waited for.
        """
        quiet = {
            rank
            for rank, at in self.last_heard_s.items()
            if end.code and self.drained_s - at > FINAL_SIGNAL_S
        }
        self._unacknowledged = {*self.last_heard_s} - {*here} - quiet - self.absent
        self.publish(self.control_update._replace(end=end))
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
        """Do not count the time for which this process was stopped as silence of any rank."""
        self.resumed_s = now
        for rank in self.last_heard_s:
            self.last_heard_s[rank] += stopped_s

    def send_join_answer(self, number: int, send_join_answer: JoinAnswer) -> None:
        """Send the answer to a join request."""
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
                    queue = uploads.vector_queue(record, incarnation)
                    vector = uploads.receive_vector(self._store, queue, record, self._sizes[rank])
                    self._prefetched += vector is not None
                    self._consumed_from[queue] += vector is not None
                elif isinstance(record, CheckpointPartSaved):
                    vector = uploads.receive_checkpoint_part(self._store, record)
                    self._prefetched += vector is not None
                elif isinstance(record, ModuleState):
                    vector = uploads.receive_state(self._store, record, incarnation)
                    self._prefetched += 1
                    self._consumed_from[uploads.state_queue(rank, incarnation)] += 1
                self._inbox.append((record, vector))

    def _write_store(self) -> None:
        while self._unacknowledged and (item := self._store.pop(END_SEEN)):
            rank, incarnation = split_sender(item[0])
            if incarnation == self.incarnations.get(rank):  # and not that it was dropped
                self._unacknowledged.discard(rank)
        while self._outbox:
            queue, text = self._outbox.popleft()
            self._store.push(queue, CONTROLLER, text)
        update = self.control_update._replace(taken=dict(self._consumed_from))
        if update != self._published or time.monotonic() > self._due:
            self._published, self._due = update, time.monotonic() + PULSE_S
            text = update.dumps().encode()
            for rank in self.last_heard_s.keys() - self.absent:
                self._store.push(control_queue(rank, self.incarnations[rank]), CONTROLLER, text)
        self._over = bool(self._published.end and not self._unacknowledged)


EVERY_S = 0.2
CHUNK = 1_000_000  # characters in one item of the store, which refuses more than 8 MB
# snapshots (and updates) of a rank that wait here, and in the store; of more, all but the last are
# spared
MAX_PENDING = 4
STATES = 2  # of a worker's module that are on their way at a time
INCARNATIONS = 1 << 20  # between the numbers of two lives; more than there are ranks
RECORDS, END_SEEN = (
    "records",
    "noted",
)  # queues of all ranks: their records; that they know of the end


def described(record: Record) -> str:
    """Return the fields of a record but its rank, as text."""
    return ", ".join(
        f"{name}={value}"
        for name, value in record._asdict().items()
        if name not in ("rank", "counts")
    )


class Reporter:
    """A rank's end: sends its records, heartbeats and models, and reads the control updates of the
    controller.
    """

    def __init__(
        self,
        store: AuthenticatedStore,
        rank: int,
        rounds: Rounds,
        watchdog: Watchdog,
        incarnation: int = 0,
    ) -> None:
        self.stopping: str | None = None
        self.scores: dict[str, float | None] | None = None
        self.end: End | None = None  # of the run, once it has one
        self.control_update = ControlUpdate()  # the last that came
        self.on_update: Callable[[ControlUpdate], None] = lambda update: (
            None
        )  # who else wants to know, in this one's thread
        self.rounds, self._rank, self._incarnation, self._broken = rounds, rank, incarnation, False
        self.on_evicted: Callable[[End], NoReturn] = (
            exit_process  # where the run has gone on without this rank
        )
        self.checkpoint_writer: RankCheckpointWriter | None = (
            None  # of this rank's part of checkpoints
        )
        self.make_heartbeat: Callable[[], Record] = lambda: Alive(rank)
        self.learner: Learner | None = None  # whose module's state is shown
        self._pending_states: deque[tuple[Any, bool]] = deque()
        self._store, self._watch = store, watchdog
        self._outbox: deque[tuple[Record, Tensor | None]] = deque()
        self._uploaded: Counter[str] = (
            Counter()
        )  # vectors by queue, and how many home has taken out of each
        self._consumed: dict[str, int] = {}
        self._pending: dict[type, int] = {
            Snapshot: 0,
            UpdateShown: 0,
        }  # among them, with their vectors
        self._lock, self._flush_lock = threading.Lock(), threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True, name="reporter")
        self._thread.start()

    def emit(self, record: Record) -> None:
        """Send a record to the controller."""
        if isinstance(
            record,
            StageEnd | StageBoundary | Replan | PlanMade | CheckpointPartSaved | PeerUnreachable,
        ):
            logger.info("reports %s: %s", type(record).__name__, described(record))
        elif not isinstance(record, RankError):
            logger.debug("reports %s", type(record).__name__)
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
        """Send what forward passes have changed of this worker's module in the end; nothing older
        is sent after it.
        """
        with self._flush_lock:
            self.learner = None
            self._pending_states.append((state, True))

    def _upload_states(self) -> Iterator[str]:
        """Send what is to be shown, where home has kept up, and ask for the next; yields the
        records.
        """
        queue = uploads.state_queue(self._rank, self._incarnation)
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
                        uploads.upload_state(self._store, self._rank, self._incarnation, state),
                        last,
                    )
                )

    def close(self) -> None:
        """Send all that is queued, and stop."""
        self._end.set()
        self._thread.join()
        if not self._broken:
            try:
                self._flush()
            except Exception as error:
                self._fail(error)

    def await_run_end(self, limit_s: float = float("inf")) -> End | None:
        """How the run has ended, once home says so; None where it does not within that time. To be
        asked at last.
        """
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
        """Nothing can be recorded of this rank any longer: that is why the run ends, not that it
        was not heard of.
        """
        self._broken = True
        text = f"its records cannot be sent: {type(error).__name__}: {first_line(error)}"
        try:
            self._push([dumps(RankError(self._rank, text, consequence=False))])
        except RuntimeError:
            exit_process(
                End(1, f"the job's store at {self._store.address} is gone: {first_line(error)}")
            )
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
            self._store.push(
                RECORDS, sender_number(self._rank, self._incarnation), "\n".join(lines).encode()
            )

    def _listen(self) -> None:
        """Take in the news. Where the run has failed, this process ends here, whatever it
        is doing.
        """
        while item := self._store.pop(control_queue(self._rank, self._incarnation)):
            update = ControlUpdate.loads(item[1])
            self._watch.record_controller_message()
            if update.stopping and not self.stopping:
                logger.info("is asked to stop: %s", update.stopping)
            if update.wanted is not None and update.wanted != self.control_update.wanted:
                logger.info("checkpoint %d is due at version %d", *update.wanted)
            if update.end and not self.end:
                logger.info(
                    "the run has ended with code %d: %s",
                    update.end.code,
                    update.end.why or "as planned",
                )
            self.stopping = self.stopping or update.stopping
            self.scores, self.end, self._consumed = update.scores, update.end, update.taken or {}
            self.control_update = update
            self.on_update(update)
            if update.end:
                self._store.push(END_SEEN, sender_number(self._rank, self._incarnation), b"")
            if self.checkpoint_writer is not None and update.wanted is not None:
                self.checkpoint_writer.asked = Due(*update.wanted)
            if update.end and update.end.code:
                (self.on_evicted if update.end.code == EXIT_EVICTED else exit_process)(update.end)
        self._watch.record_store_answer()

    def _upload_vector(self, record: Record, vector: Tensor) -> Record | None:
        """Send the vector ahead of its record; None where the monitor has not kept up and this one
        can be spared.
        """
        assert isinstance(record, Snapshot | UpdateShown)
        with self._lock:
            self._pending[type(record)] -= 1
        queue = uploads.vector_queue(record, self._incarnation)
        if (
            not is_last(record)
            and self._uploaded[queue] - self._consumed.get(queue, 0) >= MAX_PENDING
        ):
            return None
        self._uploaded[queue] += 1

        def send_heartbeat() -> None:  # a large model takes its time, and is not late
            self._push([dumps(self.make_heartbeat())])
            self._listen()

        return record._replace(
            nbytes=uploads.upload_vector(self._store, queue, record, vector, send_heartbeat)
        )


def is_last(record: Record) -> bool:
    return isinstance(record, Snapshot) and record.final


def control_queue(rank: int, incarnation: int) -> str:
    """Return the queue of control updates for this incarnation of a rank."""
    return f"control/{rank}/{incarnation}"


def sender_number(rank: int, incarnation: int) -> int:
    """Return the sender's number in the store: one for each incarnation of a rank."""
    return incarnation * INCARNATIONS + rank


def split_sender(number: int) -> tuple[int, int]:
    """Return rank and incarnation of a sender."""
    incarnation, rank = divmod(number, INCARNATIONS)
    return rank, incarnation


FILE = "job.json"
JOIN_REQUESTS = "asks"  # a queue


class JoinEndpoint(NamedTuple):
    """Where the store of a run is, and what a joining process must have in common with the run."""

    host: Text
    port: int
    secret: Text
    machine: Text
    name: Text  # of the machine
    ashl: Text
    torch: Text
    python: Text


class JoinRequest(NamedTuple):
    """A request for the place of a failed worker: of this one, or of any if None."""

    worker: int | None = None

    def dumps(self) -> bytes:
        return json.dumps(self._asdict()).encode()

    @staticmethod
    def loads(text: bytes) -> JoinRequest:
        return validate(JoinRequest, json.loads(text), "a question")


class JoinAnswer(NamedTuple):
    """The place and incarnation of an admitted process, or the reason of a rejection."""

    refused: Text | None = None
    worker: int = 0
    incarnation: int = 0
    how: Text = ""  # the worker was lost
    plan: str = ""
    controller_host: Text = ""
    rounds: Rounds = "none"
    device: Text = ""
    have_own_gpus: bool = False

    def dumps(self) -> bytes:
        return json.dumps(self._asdict()).encode()

    @staticmethod
    def loads(text: bytes) -> JoinAnswer:
        return validate(JoinAnswer, json.loads(text), "an answer")


def answer_queue(number: int) -> str:
    """Return the queue of the answer to the request with this number."""
    return f"answer/{number}"


def versions() -> tuple[str, str, str]:
    return __version__, torch.__version__, platform.python_version()


@contextmanager
def publish_join_endpoint(run_dir: Path, host: str, port: int, secret: Secret) -> Generator[None]:
    """While this lasts, the run may be joined. Raises AshlError where the file cannot be
    written.
    """
    path = run_dir / FILE
    endpoint = JoinEndpoint(host, port, secret.hex(), machine(), platform.node(), *versions())
    try:
        path.unlink(missing_ok=True)  # of a run whose home was killed
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(file, "w", encoding="utf-8") as text:
            json.dump(endpoint._asdict(), text)
    except OSError as error:
        raise AshlError(
            f"cannot write {path} ({error.strerror}); choose another run.dir"
        ) from error
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()


def read_join_endpoint(run_dir: Path) -> JoinEndpoint:
    """Of a run that goes on here. Raises UsageError where there is none that this process could
    join.
    """
    path = run_dir / FILE
    try:
        endpoint = validate(JoinEndpoint, parsed(path.read_text(encoding="utf-8")), "something")
    except FileNotFoundError:
        raise UsageError(f"{run_dir}: {why_not_joinable(run_dir)}") from None
    except PermissionError:
        raise UsageError(
            f"{run_dir}: the run is another user's, and only that user may join it."
        ) from None
    except (OSError, ValueError, AshlError) as error:
        raise UsageError(f"{path} says nothing that a run would ({error}).") from error
    if endpoint.machine != machine():
        raise UsageError(
            f"{run_dir}: the run is on {endpoint.name}, on its loopback; join it there."
        )
    for name, theirs, own in zip(
        ("ashl", "torch", "Python"), endpoint[-3:], versions(), strict=True
    ):
        if theirs != own:
            raise UsageError(
                f"{run_dir}: the run has {name} {theirs}, and here is {own}; install the same on"
                " both."
            )
    return endpoint


def why_not_joinable(run_dir: Path) -> str:
    """Why a run without such a file cannot be joined."""
    if (run_dir / "summary.json").exists():
        return "the run is over."
    if not (run_dir / "config.yaml").exists():
        return "there is no run; name the folder of one that is running."
    return "this run cannot be joined: it is in virtual time, was started by others, or was killed."


def newest_joinable_run(runs: Path) -> Path:
    """The folder of the run under this one that began last among those that go on. Raises
    UsageError where none does.
    """
    joinable: list[tuple[float, Path]] = []
    for path in runs.glob(f"**/{FILE}"):
        with suppress(OSError):
            joinable.append((path.stat().st_mtime, path.parent))
    if not joinable:
        raise UsageError(
            f"No run under {runs} is running that could be joined; name the folder of one."
        )
    return max(joinable)[1]


def poll_until(limit_s: float) -> Generator[None]:
    """Look again and again for so long."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        yield
        time.sleep(0.02)
