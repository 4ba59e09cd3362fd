"""Messages between the controller and the ranks of a run, through the job's store.

Each rank reports to the controller five times a second (`Reporter`): its heartbeat, the records
queued since its last report, and their contents. The answer to a report is the controller's present
control update: the request to stop, which workers failed or rejoined, and how the run ended. The
store serves each rank by a thread of its own (`ControlChannel`), so an evaluation in the main
thread of the controller delays no answer.

The content of a record is a model, the state of a worker's module, or a part of a checkpoint. It
travels in pieces ahead of its record, each in a report of its own. So the rank sends heartbeats
meanwhile.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any, NoReturn

import torch
from torch import Tensor

from ashl.device import to_host
from ashl.errors import AshlError
from ashl.learn.learner import Learner
from ashl.run.authenticated_store import StoreClient, StoreServer
from ashl.run.process_setup import EXIT_EVICTED
from ashl.runtime.plain_state import encode
from ashl.runtime.rank_checkpoint import RankCheckpointWriter
from ashl.runtime.records import (
    CheckpointPartSaved,
    ControlUpdate,
    End,
    ModuleState,
    RankError,
    Record,
    Rounds,
    Snapshot,
    as_fields,
    record_of,
    validate,
)
from ashl.runtime.transport import first_line
from ashl.size_only import Vector

POLL_S = 0.03  # seconds between two passes of the controller's loop
EVERY_S = 0.2  # seconds between two reports of a rank
# Seconds that the controller waits until all ranks have read how the run ended. It holds for a run
# that failed, and for one whose ranks did not exit in time after an interrupt.
FINAL_SIGNAL_S = 1.5
# The same for any other run. The controller also waits for this long until the ranks have exited
# after Ctrl-C, and until it can answer a join request.
PATIENCE_S = 5.0
CHUNK = 1000  # records in a report
PIECE = 4_000_000  # bytes of a model or state in a report
# Models of a rank that are queued, in flight or received, and that the controller has not used yet.
# At this number the rank drops new models, except the final one.
MAX_PENDING_MODELS = 8
MAX_PENDING_STATES = 2  # the same bound for states of a worker's module
Content = Tensor | bytes  # the content of a record
MAX_TICK_S = 0.5  # a process with more seconds between two ticks was stopped in between

logger = logging.getLogger(__name__)


class AwakeTime:
    """Measures the seconds for which this process was not stopped, from tick to tick."""

    def __init__(self) -> None:
        self.resumed_s = 0.0  # value of `passed_s` when the latest stop ended
        self._last_s = time.monotonic()
        self._passed_s = 0.0
        self._lock = threading.Lock()

    def passed_s(self) -> float:
        """Return the seconds without stops up to now; this call is a tick.

        A stop counts as `MAX_TICK_S`.
        """
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._last_s > MAX_TICK_S:
                self.resumed_s = self._passed_s
            self._passed_s += min(now_s - self._last_s, MAX_TICK_S)
            self._last_s = now_s
            return self._passed_s


class ControlChannel:
    """The controller's end: receives the reports of all ranks, and answers with the control update.

    Silence is measured in the seconds for which this process was not stopped, for example by
    Ctrl-Z: the ranks may have been stopped with it. Each report of a rank and each pass of the
    controller's loop is a tick of this time.

    Threads: the controller's main thread calls the public methods. The thread of each connection
    runs the handlers: it fills the inbox, and reads the control update and the incarnations. Single
    operations on deques, dicts and sets need no lock.
    """

    def __init__(
        self,
        store: StoreServer,
        num_ranks: int,
        num_params: int,
        shard_sizes: Mapping[int, int] | None = None,
    ) -> None:
        """Accept reports from now on.

        Args: shard_sizes, the number of parameters by rank of the ranks that hold a shard of the
        model; all others hold `num_params`.
        """
        self.awake = AwakeTime()
        # `awake_s` at the latest report of each rank
        self.last_heard_s = dict.fromkeys(range(num_ranks), 0.0)
        # the incarnation of each rank whose reports count
        self.incarnations = dict.fromkeys(range(num_ranks), 0)
        self.absent: set[int] = set()  # failed ranks for which no process is rejoining
        self.control_update = ControlUpdate()
        self._sizes = dict.fromkeys(range(num_ranks), num_params) | dict(shard_sizes or {})
        self._inbox: deque[tuple[Record, Content | None, tuple[int, int]]] = deque()
        # by sender, which is (rank, incarnation): received pieces of the next content
        self._pieces = defaultdict[tuple[int, int], bytearray](bytearray)
        # by sender: contents that the controller has used, by kind of record
        self._used = defaultdict[tuple[int, int], Counter[str]](Counter)
        self._evicted: dict[tuple[int, int], End] = {}
        self._senders: dict[int, tuple[int, int]] = {}  # by thread of the connection
        self._closed: set[tuple[int, int]] = set()  # senders whose connection was closed
        self._error: AshlError | None = None
        store.handlers |= {
            "report": self._receive,
            "closed": self._note_closed,
        }

    @property
    def awake_s(self) -> float:
        """Return the seconds for which this process was not stopped, up to now."""
        return self.awake.passed_s()

    def silent_s(self, rank: int) -> float:
        """Return for how long a rank has not reported."""
        return self.awake_s - self.last_heard_s[rank]

    def is_closed(self, rank: int) -> bool:
        """Return True if the connection of a rank was closed: its process has ended."""
        return (rank, self.incarnations[rank]) in self._closed

    def receive_records(self) -> Iterator[tuple[Record, Content | None]]:
        """Yield the received records, each with the model, update, module state or part of a
        checkpoint that belongs to it. Records of earlier incarnations are dropped.

        Raises: AshlError if a record is invalid.
        """
        while self._inbox:
            record, content, sender = self._inbox.popleft()
            # another process has taken the sender's place since this record arrived
            if sender[1] < self.incarnations[sender[0]]:
                continue
            if content is not None:
                self._used[sender][type(record).__name__] += 1
            yield record, content
        if self._error is not None:
            raise self._error

    def evict(self, rank: int, end: End) -> None:
        """End the present incarnation of a rank at its next report."""
        self._evicted[rank, self.incarnations[rank]] = end

    def expect_reports(self, rank: int, thread: int) -> None:
        """Expect the reports of a rank's present incarnation by the connection that this thread
        serves. If the connection is closed, the process of the rank has ended.
        """
        self._senders[thread] = rank, self.incarnations[rank]

    def close(self, end: End, here: Collection[int]) -> None:
        """Tell all ranks how the run ended, and wait until the ranks on other nodes have closed
        their connections: the store may end with this process.

        Waits at most `FINAL_SIGNAL_S` after a failure, else `PATIENCE_S`. After a failure it does
        not wait for silent ranks.
        Args: here, the ranks on this node.
        """
        silent = {
            rank for rank in self.last_heard_s if end.code and self.silent_s(rank) > FINAL_SIGNAL_S
        }
        self.control_update = self.control_update._replace(end=end)
        until_s = time.monotonic() + (FINAL_SIGNAL_S if end.code else PATIENCE_S)
        awaited = {*self.last_heard_s} - {*here} - silent - self.absent
        while not all(map(self.is_closed, awaited)) and time.monotonic() < until_s:
            time.sleep(POLL_S)

    def _receive(
        self, rank: int, incarnation: int, records: list[dict[str, Any]], piece: bytes
    ) -> ControlUpdate:
        """Apply a report, in the thread of the rank's connection; return the answer."""
        sender = rank, incarnation
        self._senders[threading.get_ident()] = sender
        end = self._evicted.get(sender)
        if end is None and incarnation < self.incarnations.get(rank, 0):
            end = End(EXIT_EVICTED, f"another process has taken the place of worker {rank}")
        if end is not None:  # a run that has ended evicts nobody
            return self.control_update if self.control_update.end else ControlUpdate(end=end)
        if rank in self.last_heard_s:
            self.last_heard_s[rank] = self.awake_s
        self._pieces[sender] += piece
        try:
            for fields in records:
                record = record_of(fields)
                if record.rank != rank or rank not in self.last_heard_s:
                    raise AshlError(f"a record of rank {record.rank} came from rank {rank}")
                self._inbox.append((record, self._content_of(record, sender), sender))
        except AshlError as error:
            self._error = error
        return self.control_update._replace(taken=dict(self._used[sender]))

    def _content_of(self, record: Record, sender: tuple[int, int]) -> Content | None:
        """Return the content of a record: float32 [d] of a model, else bytes; None if it has none.

        Raises: AshlError if the content has another size than announced or expected.
        """
        if not isinstance(record, Snapshot | ModuleState | CheckpointPartSaved):
            return None
        if not record.nbytes:
            return None
        content = self._pieces.pop(sender, bytearray())
        size = self._sizes[record.rank]
        if len(content) != record.nbytes:
            raise AshlError(f"rank {record.rank} sent {len(content):,} of {record.nbytes:,} bytes")
        if isinstance(record, ModuleState | CheckpointPartSaved):
            return bytes(content)
        if record.nbytes != 4 * size:
            raise AshlError(
                f"rank {record.rank} sent {record.nbytes // 4} parameters, and {size} were expected"
            )
        return torch.frombuffer(content, dtype=torch.float32)

    def _note_closed(self) -> None:
        """Note that a connection was closed, in its thread: the rank's process has ended."""
        if sender := self._senders.pop(threading.get_ident(), None):
            self._closed.add(sender)


def exit_process(end: End) -> NoReturn:
    """End this process without destructors, which would wait for threads that may be blocked
    forever.
    """
    with suppress(OSError, ValueError):  # the disk may be full, or the terminal closed
        if end.why:
            sys.stderr.write(f"ashl: {end.why}\n")
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(end.code)


class Reporter:
    """A rank's end: reports its heartbeats, records and models, and applies the control updates of
    the controller.

    Threads: any thread queues records. A thread of the reporter sends them until `close`, the
    thread that calls `close` sends the rest. A report blocks until the store answers, at most for
    the limit of `StoreClient.limit_answers`; then this process ends.
    """

    def __init__(
        self,
        store: StoreClient,
        rank: int,
        rounds: Rounds,
        incarnation: int = 0,
    ) -> None:
        self.stop_reason: str | None = None  # the reason to stop, once the run is to stop
        self.scores: dict[str, float | None] | None = None  # results of the latest evaluation
        self.end: End | None = None  # how the run ended, once it has
        self.control_update = ControlUpdate()  # the latest one
        # the reporter's thread passes it each control update
        self.on_update: Callable[[ControlUpdate], None] = lambda update: None
        self.rounds = rounds  # which rounds this rank records
        # called if the run continues without this rank
        self.on_evicted: Callable[[End], NoReturn] = exit_process
        self.checkpoint_writer: RankCheckpointWriter | None = None
        # replaced by the kernel's heartbeat before this rank trains
        self.make_heartbeat: Callable[[], Record | None] = lambda: None
        # set at a worker: the states of this learner's module are reported
        self.learner: Learner | None = None
        self._rank = rank
        self._incarnation = incarnation
        self._store = store
        self._broken = False  # True if records cannot be sent any more
        self._outbox: deque[tuple[Record, Any]] = deque()  # each with its content or None
        self._queued: Counter[str] = Counter()  # contents queued so far, by kind of record
        self._lock = threading.Lock()  # orders the threads that queue models
        self._flush_lock = threading.Lock()  # held while records are sent
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="reporter")
        self._thread.start()

    def emit(self, record: Record, content: Any = None) -> None:
        """Queue a record for the next report.

        Args: content, a vector, bytes or a module's state; None if the record has none.
        """
        self._outbox.append((record, content))

    def snapshot(self, record: Snapshot, vector: Vector | None) -> None:
        """Queue a model, or the counts that belong to one, for the next report.

        Args: vector, None or a size for counts alone, and in a run without gradients.
        Limits: a model other than the final one is dropped if `MAX_PENDING_MODELS` of this rank are
        pending.
        """
        if not isinstance(vector, Tensor):
            return self._outbox.append((record, None))
        kind = type(record).__name__
        with self._lock:
            if record.final or self._has_room(kind, MAX_PENDING_MODELS):
                self._queued[kind] += 1
                self._outbox.append((record, vector))

    def queue_final_state(self, state: Any) -> None:
        """Queue the final state of this worker's module: the values that forward passes change. No
        earlier state is queued after it.
        """
        with self._flush_lock:
            self.learner = None
            self._outbox.append((ModuleState(self._rank, 0, last=True), state))

    def close(self) -> None:
        """Stop the reporter's thread, then report all records that are still queued."""
        self._closed.set()
        self._thread.join()
        self._try_flush()

    def await_run_end(self, limit_s: float = float("inf")) -> End | None:
        """Wait until the run ends with code 0; return None after `limit_s` or if the store fails.

        If the run ends with another code, this process ends (`_report`). Call it after `close`.
        """
        until_s = time.monotonic() + limit_s
        with suppress(RuntimeError):  # the store ended with the process that served it
            while self.end is None and time.monotonic() < until_s:
                self._report([])
                time.sleep(POLL_S)
        return self.end

    def _has_room(self, kind: str, most: int) -> bool:
        """Return True if fewer than `most` contents of this kind of record are pending: queued by
        this rank, and not used yet by the controller.
        """
        return self._queued[kind] - (self.control_update.taken or {}).get(kind, 0) < most

    def _queue_state(self) -> None:
        """Queue the module's state that the learner has copied, and request the next copy.

        The copy is dropped if `MAX_PENDING_STATES` are pending.
        """
        if self.learner is None:
            return
        kind = ModuleState.__name__
        if self.learner.copied_state is not None and self._has_room(kind, MAX_PENDING_STATES):
            self._queued[kind] += 1
            self._outbox.append((ModuleState(self._rank, 0), self.learner.copied_state))
        self.learner.copied_state = None
        self.learner.copy_requested = True

    def _run(self) -> None:
        while not self._closed.wait(EVERY_S):
            self._try_flush()

    def _try_flush(self) -> None:
        """Report a heartbeat and all queued records; after an error, send empty reports only."""
        try:
            self._report([]) if self._broken else self._flush()
        except Exception as error:
            self._report_failure(error)

    def _report_failure(self, error: Exception) -> None:
        """Report that this rank's records cannot be sent, so that the run ends for this reason and
        not for missed heartbeats.
        """
        self._broken = True
        text = f"its records cannot be sent: {type(error).__name__}: {first_line(error)}"
        try:
            self._report([RankError(self._rank, text, consequence=False)])
        except RuntimeError:
            exit_process(End(1, first_line(error)))
        with suppress(OSError):  # the rank's log may be on a full disk
            traceback.print_exception(error)

    def _flush(self) -> None:
        """Report a heartbeat and all queued records."""
        with self._flush_lock:
            self._queue_state()
            records = [self.make_heartbeat()]
            while self._outbox:
                record, content = self._outbox.popleft()
                if content is not None or len(records) > CHUNK:
                    self._report(records)
                    records = []
                if content is not None:
                    self._report_content(record, content)
                else:
                    records.append(record)
            self._report(records)

    def _report_content(self, record: Any, content: Any) -> None:
        """Report the content of a record in pieces, the last piece with the record."""
        if isinstance(content, Tensor):
            on_host = to_host(content.to(torch.float32)).contiguous()
            content = memoryview(on_host.numpy()).cast("B")
        elif isinstance(record, ModuleState):
            content = encode(content)
        whole = memoryview(content)
        last = max(0, whole.nbytes - 1) // PIECE * PIECE  # offset of the last piece
        for start in range(0, last, PIECE):
            self._report([self.make_heartbeat()], whole[start : start + PIECE])
        self._report([record._replace(nbytes=whole.nbytes)], whole[last:])

    def _report(self, records: list[Record | None], piece: bytes | memoryview = b"") -> None:
        """Send a report without the None in it, and apply the control update that answers it.

        If the run ended with another code than 0, or this rank is evicted, this process ends here.
        """
        fields = [as_fields(record) for record in records if record is not None]
        answer = self._store.call("report", self._rank, self._incarnation, fields, piece)
        update = validate(ControlUpdate, answer, "a control update")
        if update.stop_reason and not self.stop_reason:
            logger.info("is asked to stop: %s", update.stop_reason)
        self.stop_reason = self.stop_reason or update.stop_reason
        self.scores = update.scores
        self.control_update = update
        self.on_update(update)
        if update.end is None:
            return
        is_new, self.end = self.end is None, update.end
        if is_new:
            logger.info(
                "the run has ended with code %d: %s",
                update.end.code,
                update.end.why or "as planned",
            )
        if self.end.code:
            (self.on_evicted if self.end.code == EXIT_EVICTED else exit_process)(self.end)
