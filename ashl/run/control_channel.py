"""Messages between the controller and the ranks of a run, through the job's key-value store.

Records, heartbeats and models flow from each rank (`Reporter`) to the controller
(`ControlChannel`). Control updates flow back: the request to stop, which workers failed or
rejoined, which checkpoint is due, and how the run ended. Each side has one thread that calls the
store, so a store that does not answer holds up neither training nor an evaluation. The run folder
holds the run's join endpoint (`JoinEndpoint`). By it, a joining process on the same node finds the
store, and asks for the place of a failed worker (`JoinRequest`, `JoinAnswer`).
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
from ashl.runtime.rank_checkpoint import RankCheckpointWriter
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

POLL_S = 0.03  # seconds between two reads of the store by the controller
PULSE_S = 0.25  # seconds between two control updates
PREFETCH = 2  # vectors that the controller takes out of the store ahead of their use
CONTROLLER = -1  # the controller's number as a sender
FINAL_SIGNAL_S = 1.5  # seconds that the controller waits for ranks of a failed run to read its end
# The same for a run that did not fail; after Ctrl-C, for the ranks to exit in order.
PATIENCE_S = 5.0


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
        """Start the thread that calls the store.

        Args: shard_sizes, the number of parameters by rank of the ranks that hold a shard of the
        model; all others hold `num_params`.
        """
        now_s = time.monotonic()
        # controller time at which the latest record of each rank was read
        self.last_heard_s = dict.fromkeys(range(num_ranks), now_s)
        # the incarnation of each rank whose records are read
        self.incarnations = dict.fromkeys(range(num_ranks), 0)
        self.absent: set[int] = set()  # failed ranks for which no process is rejoining
        self.drained_s = now_s  # controller time at which the record queue was last empty
        self.store_answered_s = now_s  # controller time of the store's latest answer
        # Controller time at which this process was resumed after a stop, for example by Ctrl-Z. The
        # ranks may have been stopped with it.
        self.resumed_s = 0.0
        self.store = f"the job's store at {store.address}"
        self._store = store
        self._sizes = dict.fromkeys(range(num_ranks), num_params) | dict(shard_sizes or {})
        self.control_update = ControlUpdate()
        self._published = self.control_update
        self._due_s = 0.0  # controller time at which the control update is published again
        self._outbox: deque[tuple[str, bytes]] = deque()  # queue and message
        self.join_requests: deque[tuple[int, JoinRequest]] = deque()  # each with its number
        self._inbox: deque[tuple[Record, Tensor | None]] = deque()
        self._prefetched = 0  # vectors taken out of the store
        self._consumed = 0  # vectors passed on by `receive_records`
        self._consumed_from: Counter[str] = Counter()  # vectors taken out, by queue
        self._error: Exception | None = None
        self._wake = threading.Event()
        self._over = False
        # ranks that have not read yet how the run ended; None before it has ended
        self._unacknowledged: set[int] | None = None
        self._thread = threading.Thread(target=self._loop, daemon=True, name="control_channel")
        self._thread.start()

    @property
    def refused(self) -> int:
        """Return how many messages of untrusted clients were rejected."""
        return self._store.refused

    def receive_records(self) -> Iterator[tuple[Record, Tensor | None]]:
        """Yield the received records, each with the model, update, module state or part of a
        checkpoint that belongs to it.

        Raises: AshlError if a record is invalid or the store has failed.
        """
        while self._inbox:
            record, vector = self._inbox.popleft()
            self._consumed += vector is not None
            yield record, vector
        if isinstance(self._error, AshlError):
            raise self._error
        if self._error is not None:
            raise AshlError(f"{self.store} failed: {first_line(self._error)}") from self._error

    def publish(self, update: ControlUpdate) -> None:
        """Publish this control update to all ranks every `PULSE_S` until another replaces it."""
        self.control_update = update
        self._wake.set()

    def evict(self, rank: int, end: End) -> None:
        """Send the present incarnation of a rank the control update that evicts it."""
        self._outbox.append(
            (control_queue(rank, self.incarnations[rank]), ControlUpdate(end=end).dumps().encode())
        )
        self._wake.set()

    def close(self, end: End, here: Collection[int]) -> None:
        """Tell all ranks how the run ended, and wait until the ranks on other nodes have read it:
        the store may end with this process.

        Waits at most `FINAL_SIGNAL_S` after a failure, else `PATIENCE_S`. After a failure it does
        not wait for silent ranks.
        Args: here, the ranks on this node.
        """
        silent = {
            rank
            for rank, at in self.last_heard_s.items()
            if end.code and self.drained_s - at > FINAL_SIGNAL_S
        }
        self._unacknowledged = {*self.last_heard_s} - {*here} - silent - self.absent
        self.publish(self.control_update._replace(end=end))
        self._thread.join(FINAL_SIGNAL_S if end.code else PATIENCE_S)
        self._unacknowledged = set()

    def _loop(self) -> None:
        """Read and write the store until the end of the run is published and acknowledged."""
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

    def send_join_answer(self, number: int, answer: JoinAnswer) -> None:
        """Send the answer to the join request with this number."""
        self._outbox.append((answer_queue(number), answer.dumps()))
        self._wake.set()

    def _read_store(self) -> None:
        """Read one join request, and records until the queue is empty or enough vectors wait."""
        if item := self._store.pop(JOIN_REQUESTS):
            # a process with another version of ashl may send an invalid request; it times out
            with suppress(AshlError, ValueError):
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
                    break  # an evicted incarnation that has not read yet that it is evicted
                self.last_heard_s[rank] = time.monotonic()
                self._inbox.append((record, self._receive_content(record, incarnation)))

    def _receive_content(self, record: Record, incarnation: int) -> Tensor | None:
        """Take out of the store the vector or bytes that a record announces, if it does."""
        content = None
        if isinstance(record, Snapshot | UpdateShown):
            queue = uploads.vector_queue(record, incarnation)
            size = self._sizes[record.rank]
            content = uploads.receive_vector(self._store, queue, record, size)
            self._consumed_from[queue] += content is not None
        elif isinstance(record, CheckpointPartSaved):
            content = uploads.receive_checkpoint_part(self._store, record)
        elif isinstance(record, ModuleState):
            content = uploads.receive_state(self._store, record, incarnation)
            self._consumed_from[uploads.state_queue(record.rank, incarnation)] += 1
        self._prefetched += content is not None
        return content

    def _write_store(self) -> None:
        """Read acknowledgements of the run's end, and send all queued messages."""
        while self._unacknowledged and (item := self._store.pop(END_SEEN)):
            rank, incarnation = split_sender(item[0])
            # an evicted incarnation acknowledges its eviction in the same queue
            if incarnation == self.incarnations.get(rank):
                self._unacknowledged.discard(rank)
        while self._outbox:
            queue, text = self._outbox.popleft()
            self._store.push(queue, CONTROLLER, text)
        update = self.control_update._replace(taken=dict(self._consumed_from))
        if update != self._published or time.monotonic() > self._due_s:
            self._published = update
            self._due_s = time.monotonic() + PULSE_S
            text = update.dumps().encode()
            for rank in self.last_heard_s.keys() - self.absent:
                self._store.push(control_queue(rank, self.incarnations[rank]), CONTROLLER, text)
        self._over = bool(self._published.end and not self._unacknowledged)


EVERY_S = 0.2  # seconds between two heartbeats of a rank
# characters in one item of the store, which refuses more than 8 MB
CHUNK = 1_000_000
# Models (and updates) of a rank that wait in its process, and in the store. Beyond that, it drops
# all except the last one.
MAX_PENDING = 4
STATES = 2  # states of a worker's module that are in flight at a time
INCARNATIONS = 1 << 20  # difference of two incarnations' sender numbers; larger than any rank
RECORDS = "records"  # queue of the records of all ranks
END_SEEN = "noted"  # queue of the ranks' acknowledgements of the run's end


def described(record: Record) -> str:
    """Return the fields of a record as text, without its rank and counts."""
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
        self.stopping: str | None = None  # the reason to stop, once the run is to stop
        self.scores: dict[str, float | None] | None = None  # results of the latest evaluation
        self.end: End | None = None  # how the run ended, once it has
        self.control_update = ControlUpdate()  # the latest one
        # the reporter's thread runs it for each control update
        self.on_update: Callable[[ControlUpdate], None] = lambda update: None
        self.rounds = rounds
        self._rank = rank
        self._incarnation = incarnation
        self._broken = False  # True if records cannot be sent any more
        # called if the run continues without this rank
        self.on_evicted: Callable[[End], NoReturn] = exit_process
        self.checkpoint_writer: RankCheckpointWriter | None = None
        self.make_heartbeat: Callable[[], Record] = lambda: Alive(rank)
        self.learner: Learner | None = None  # sends its module's state if set
        self._pending_states: deque[tuple[Any, bool]] = deque()  # state, and True for the last
        self._store = store
        self._watch = watchdog
        self._outbox: deque[tuple[Record, Tensor | None]] = deque()
        self._uploaded: Counter[str] = Counter()  # vectors put into each queue
        self._consumed: dict[str, int] = {}  # vectors that the controller took out of each queue
        # records in the outbox that have a vector, by type
        self._pending: dict[type, int] = {Snapshot: 0, UpdateShown: 0}
        self._lock = threading.Lock()
        self._flush_lock = threading.Lock()
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
        """Send a model or an update; it is dropped if `MAX_PENDING` wait already and it is not the
        last one.
        """
        if not isinstance(vector, Tensor):
            self._outbox.append((record, None))
            return
        with self._lock:
            if self._pending[type(record)] >= MAX_PENDING and not is_last(record):
                return
            self._pending[type(record)] += 1
        self._outbox.append((record, vector))

    def show_last_state(self, state: Any) -> None:
        """Send the final state of this worker's module: the values that forward passes change. No
        earlier state is sent after it.
        """
        with self._flush_lock:
            self.learner = None
            self._pending_states.append((state, True))

    def _upload_states(self) -> Iterator[str]:
        """Upload the module's state if fewer than `STATES` are in flight, yield its record, and
        request the next state from the learner.
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
        """Send all queued records, and stop the thread."""
        self._end.set()
        self._thread.join()
        if not self._broken:
            try:
                self._flush()
            except Exception as error:
                self._fail(error)

    def await_run_end(self, limit_s: float = float("inf")) -> End | None:
        """Return how the run ended, once the controller says so; None after `limit_s` or if the
        store fails. Call it after `close`.
        """
        until_s = time.monotonic() + limit_s
        with suppress(RuntimeError):  # the store ended with the process that served it
            while self.end is None and time.monotonic() < until_s:
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
        """Report that this rank's records cannot be sent, so that the run ends for this reason and
        not for missed heartbeats.
        """
        self._broken = True
        text = f"its records cannot be sent: {type(error).__name__}: {first_line(error)}"
        try:
            self._push([dumps(RankError(self._rank, text, consequence=False))])
        except RuntimeError:
            exit_process(
                End(1, f"the job's store at {self._store.address} failed: {first_line(error)}")
            )
        with suppress(OSError):  # the rank's log may be on a full disk
            traceback.print_exception(error)

    def _flush(self) -> None:
        """Send a heartbeat and all queued records, and read control updates."""
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
        """Apply all received control updates.

        If the run has failed or this rank is evicted, this process ends here.
        """
        while item := self._store.pop(control_queue(self._rank, self._incarnation)):
            update = ControlUpdate.loads(item[1])
            self._watch.record_controller_message()
            if update.stopping and not self.stopping:
                logger.info("is asked to stop: %s", update.stopping)
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
            if update.end and update.end.code:
                (self.on_evicted if update.end.code == EXIT_EVICTED else exit_process)(update.end)
        self._watch.record_store_answer()

    def _upload_vector(self, record: Record, vector: Tensor) -> Record | None:
        """Upload a vector, and return its record with the number of bytes; None if the record is
        dropped, because `MAX_PENDING` wait in the store and it is not the last one.
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

        def send_heartbeat() -> None:  # the upload of a large model may outlast the timeout
            self._push([dumps(self.make_heartbeat())])
            self._listen()

        return record._replace(
            nbytes=uploads.upload_vector(self._store, queue, record, vector, send_heartbeat)
        )


def is_last(record: Record) -> bool:
    """Return True for the run's last model, which is never dropped."""
    return isinstance(record, Snapshot) and record.final


def control_queue(rank: int, incarnation: int) -> str:
    """Return the queue of control updates for this incarnation of a rank."""
    return f"control/{rank}/{incarnation}"


def sender_number(rank: int, incarnation: int) -> int:
    """Return the sender number in the store of one incarnation of a rank."""
    return incarnation * INCARNATIONS + rank


def split_sender(number: int) -> tuple[int, int]:
    """Return the rank and the incarnation of a sender number."""
    incarnation, rank = divmod(number, INCARNATIONS)
    return rank, incarnation


FILE = "job.json"  # in the run folder while the run can be joined
JOIN_REQUESTS = "asks"  # queue of join requests


class JoinEndpoint(NamedTuple):
    """The address of a run's store, and the machine and versions that a joining process must
    share with the run.
    """

    host: Text
    port: int
    secret: Text
    machine: Text  # its unique identifier
    name: Text  # its host name
    ashl: Text
    torch: Text
    python: Text


class JoinRequest(NamedTuple):
    """A request for the place of a failed worker: of `worker`, or of any failed worker if None."""

    worker: int | None = None

    def dumps(self) -> bytes:
        return json.dumps(self._asdict()).encode()

    @staticmethod
    def loads(text: bytes) -> JoinRequest:
        return validate(JoinRequest, json.loads(text), "a join request")


class JoinAnswer(NamedTuple):
    """The place of an admitted process and its settings, or the reason of a rejection."""

    refused: Text | None = None
    worker: int = 0
    incarnation: int = 0
    how: Text = ""  # the cause of the worker's failure
    plan: str = ""
    controller_host: Text = ""
    rounds: Rounds = "none"
    device: Text = ""
    have_own_gpus: bool = False

    def dumps(self) -> bytes:
        return json.dumps(self._asdict()).encode()

    @staticmethod
    def loads(text: bytes) -> JoinAnswer:
        return validate(JoinAnswer, json.loads(text), "a join answer")


def answer_queue(number: int) -> str:
    """Return the queue of the answer to the request with this number."""
    return f"answer/{number}"


def versions() -> tuple[str, str, str]:
    """Return the versions of ashl, torch and Python of this process."""
    return __version__, torch.__version__, platform.python_version()


@contextmanager
def publish_join_endpoint(run_dir: Path, host: str, port: int, secret: Secret) -> Generator[None]:
    """Publish the join endpoint of a run in its folder until the context ends.

    Raises: AshlError if the file cannot be written.
    """
    path = run_dir / FILE
    endpoint = JoinEndpoint(host, port, secret.hex(), machine(), platform.node(), *versions())
    try:
        path.unlink(missing_ok=True)  # left by a run whose controller was killed
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(file, "w", encoding="utf-8") as text:
            json.dump(endpoint._asdict(), text)
    except OSError as error:
        raise AshlError(
            f"run.dir={run_dir}: cannot write {path.name} ({error.strerror}); choose another folder"
        ) from error
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()


def read_join_endpoint(run_dir: Path) -> JoinEndpoint:
    """Return the join endpoint of a run on this machine.

    Raises: UsageError if this process cannot join a run in this folder.
    """
    path = run_dir / FILE
    try:
        endpoint = validate(JoinEndpoint, parsed(path.read_text(encoding="utf-8")), "the file")
    except FileNotFoundError:
        raise UsageError(f"{run_dir}: {why_not_joinable(run_dir)}") from None
    except PermissionError:
        raise UsageError(
            f"{run_dir}: the run belongs to another user; only that user can join it"
        ) from None
    except (OSError, ValueError, AshlError) as error:
        raise UsageError(
            f"{path}: not a valid join endpoint ({error}); join another run"
        ) from error
    if endpoint.machine != machine():
        raise UsageError(
            f"{run_dir}: the run is on the loopback of {endpoint.name}; join it on that machine"
        )
    for name, theirs, own in zip(
        ("ashl", "torch", "Python"), endpoint[-3:], versions(), strict=True
    ):
        if theirs != own:
            raise UsageError(
                f"{run_dir}: the run has {name} {theirs}, and this process has {own}; install the"
                " same version"
            )
    return endpoint


def why_not_joinable(run_dir: Path) -> str:
    """Return the reason why a run folder without a join endpoint cannot be joined."""
    if (run_dir / "summary.json").exists():
        return "the run is over"
    if not (run_dir / "config.yaml").exists():
        return "there is no run; name the folder of one that is running"
    return (
        "this run cannot be joined: it is in virtual time, was started by another launcher, or was"
        " killed"
    )


def newest_joinable_run(runs: Path) -> Path:
    """Return the folder of the run under `runs` that published its join endpoint last.

    Raises: UsageError if no run there can be joined.
    """
    joinable: list[tuple[float, Path]] = []
    for path in runs.glob(f"**/{FILE}"):
        with suppress(OSError):
            joinable.append((path.stat().st_mtime, path.parent))
    if not joinable:
        raise UsageError(
            f"no run under {runs} is running and can be joined; name the folder of one"
        )
    return max(joinable)[1]


def poll_for(limit_s: float) -> Generator[None]:
    """Yield every 20 ms for `limit_s` seconds."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        yield
        time.sleep(0.02)
