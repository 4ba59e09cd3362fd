"""A rank's line to the monitor, through a store: what is said arrives in order, whole, and never
piles up.
"""

import io
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from ashl.errors import AshlError
from ashl.run import control_channel
from ashl.run.authenticated_store import (
    StoreAddress,
    StoreClient,
    StoreServer,
    new_secret,
)
from ashl.run.control_channel import MAX_PENDING_MODELS, Content, ControlChannel, Reporter
from ashl.run.handshake import Place, PlaceRequests, make_hello, request_place
from ashl.run.process_setup import EXIT_EVICTED
from ashl.run.rank import RankSettings, leave, run_rank
from ashl.run.supervisor import answer_requests
from ashl.runtime.records import (
    End,
    ProcessExited,
    RankError,
    Record,
    Snapshot,
    WorkerFailed,
    WorkerRejoined,
    as_fields,
)
from tests.disturbed import wait_for
from tests.support import planned

D = 1000
SECRET = new_secret()


@pytest.fixture
def server() -> Iterator[StoreServer]:
    with closing(StoreServer(SECRET)) as made:
        yield made


@pytest.fixture
def store(server) -> StoreClient:
    return StoreClient(StoreAddress("127.0.0.1", server.port, SECRET), 0.0)


@pytest.fixture
def channel(server) -> Iterator[ControlChannel]:
    made = ControlChannel(server, 5, D)
    yield made
    made.close(End(0), range(5))


def received(channel: ControlChannel) -> list[tuple[Record, Content | None]]:
    """Return all records that the controller has received."""
    return [*channel.receive_records()]


@pytest.fixture
def reporter(store, channel, monkeypatch) -> Iterator[Reporter]:
    """One that sends when it is told to."""
    monkeypatch.setattr("ashl.run.control_channel.EVERY_S", 1000.0)
    made = Reporter(store, 3, rounds="all")
    yield made
    made.close()


def test_a_model_travels_in_pieces(channel, reporter, monkeypatch) -> None:
    monkeypatch.setattr(control_channel, "PIECE", 300)
    models = {tick: torch.randn(D) for tick in range(2)}
    for tick, model in models.items():
        reporter.snapshot(Snapshot(3, 5, tick), model)
    reporter.snapshot(Snapshot(3, 6, 2), None)
    reporter.emit(ProcessExited(3))
    reporter.close()
    said = received(channel)
    assert [type(record) for record, _ in said] == [Snapshot] * 3 + [ProcessExited]
    for (_, vector), model in zip(said, models.values(), strict=False):
        assert vector is not None
        assert torch.equal(vector, model)
    assert [vector for _, vector in said[2:]] == [None, None]


def test_what_the_monitor_cannot_keep_up_with_is_spared(channel, reporter) -> None:
    for tick in range(4 * MAX_PENDING_MODELS):
        reporter.snapshot(Snapshot(3, 0, tick), torch.zeros(D))
        if tick % 2:
            reporter._flush()
    reporter.snapshot(Snapshot(3, 0, final=True), torch.ones(D))
    reporter.close()
    said = [record for record, _ in received(channel) if isinstance(record, Snapshot)]
    assert [record.tick for record in said] == [*range(MAX_PENDING_MODELS), None], (
        "the last one always comes"
    )


def test_reports_of_a_superseded_incarnation_do_not_count(store, channel, monkeypatch) -> None:
    """A model that it could not finish does not mix with that of the next one."""
    monkeypatch.setattr("ashl.run.control_channel.EVERY_S", 1000.0)
    ends: list[End] = []
    first, second = (
        Reporter(store, 3, rounds="all", incarnation=incarnation) for incarnation in (0, 1)
    )
    first.on_evicted = ends.append  # type: ignore[assignment]
    first._report([], b"half a model")
    channel.incarnations[3] = 1
    first.emit(RankError(3, "it was stopped", consequence=False))
    first.close()
    second.snapshot(Snapshot(3, 7, 0), torch.ones(D))
    second.close()
    said = received(channel)
    assert not any(isinstance(record, RankError) for record, _ in said)
    models = [content for _, content in said if isinstance(content, Tensor)]
    assert [model.mean().item() for model in models] == [1.0]
    assert ends == [End(EXIT_EVICTED, "another process has taken the place of worker 3")]


def test_a_model_of_another_size_is_an_error(channel, reporter) -> None:
    reporter.snapshot(Snapshot(3, 0), torch.zeros(D + 1))
    reporter.close()
    with pytest.raises(AshlError, match=f"rank 3 sent {D + 1} parameters, and {D} were expected"):
        received(channel)


def test_an_interrupt_leaves_the_answer_to_the_main_thread_of_a_worker(
    server, store, channel, reporter, monkeypatch
) -> None:
    """A request that is broken off would leave its answer to the next one."""
    ends: list[End] = []
    monkeypatch.setattr("ashl.run.rank.exit_process", ends.append)
    may_answer, answers = threading.Event(), list[str]()
    server.handlers["slow"] = lambda: may_answer.wait(5.0) and "slow"
    threads = [
        threading.Thread(target=lambda: answers.append(store.call("slow"))),
        threading.Thread(target=leave, args=(3, reporter)),
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    may_answer.set()
    for thread in threads:
        thread.join()
    assert (answers, ends) == (["slow"], [End(130)])
    assert [record for record, _ in received(channel)] == [WorkerFailed(3, 0, "was interrupted")]


class Line:
    """A way to the store that may be cut: what is sent then comes no further, and no connection
    breaks.
    """

    def __init__(self, port: int) -> None:
        self.cut = threading.Event()
        self._port, self._listener = port, socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                ends = [
                    self._listener.accept()[0],
                    socket.create_connection(("127.0.0.1", self._port)),
                ]
                self._sockets += ends
                for a, b in (ends, ends[::-1]):
                    threading.Thread(target=self._pass_on, args=(a, b), daemon=True).start()

    def _pass_on(self, a: socket.socket, b: socket.socket) -> None:
        with suppress(OSError):
            while data := a.recv(65536):
                if not self.cut.is_set():
                    b.sendall(data)

    def close(self) -> None:
        for end in self._sockets:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@pytest.fixture
def line(server) -> Iterator[Line]:
    made = Line(server.port)
    yield made
    made.close()


def test_a_store_that_no_longer_answers_does_not_hold_up_a_rank(line, channel, monkeypatch) -> None:
    """Some calls of torch's would hold all threads: the run hung."""
    ends: list[End] = []
    monkeypatch.setattr("ashl.run.control_channel.exit_process", ends.append)
    monkeypatch.setattr("ashl.run.control_channel.EVERY_S", 0.01)
    store = StoreClient(StoreAddress("127.0.0.1", line.port, SECRET), 0.0)
    store.limit_answers(0.4)
    made = Reporter(store, 3, rounds="all")
    for tick in range(2):
        made.snapshot(Snapshot(3, 0, tick), torch.zeros(D))
    until = time.monotonic() + 10
    said: list[Record] = []
    while sum(isinstance(record, Snapshot) for record in said) < 2:
        assert time.monotonic() < until
        said += [record for record, _ in received(channel)]
        time.sleep(0.02)
    line.cut.set()
    made.snapshot(Snapshot(3, 0, 2), torch.zeros(D))
    while not ends:
        assert time.monotonic() < until
        time.sleep(0.01)
    said = f"the job's store at {store.address} did not answer for 0.4 s"
    assert ends[0] == End(1, f"{said} (runtime.wait_timeout_s)")
    assert channel.silent_s(3) > 0.2
    made.close()  # before `exit_process` is the real one again


def test_what_is_no_record_is_an_error(store, channel) -> None:
    store.call("report", 0, 0, [as_fields(ProcessExited(0)), "hello"], b"")
    with pytest.raises(AshlError, match="a record of an unknown kind"):
        received(channel)


@pytest.mark.parametrize("sender", [1, 7])
def test_no_rank_reports_for_another(store, channel, sender) -> None:
    store.call("report", sender, 0, [as_fields(ProcessExited(0))], b"")
    with pytest.raises(AshlError, match=f"a record of rank 0 came from rank {sender}"):
        received(channel)


def test_records_that_cannot_be_sent_end_the_run_with_their_reason(
    store, channel, monkeypatch
) -> None:
    """The thread died, and after a minute the rank counted as failed."""
    monkeypatch.setattr("ashl.run.control_channel.EVERY_S", 0.001)
    made = Reporter(store, 3, rounds="all")

    def full() -> Record:
        raise OSError(28, "No space left on device")

    made.make_heartbeat = full
    wait_for(lambda: made._broken, 10)
    made.emit(ProcessExited(3))
    made.close()
    (error,) = [record for record, _ in received(channel)]
    said = "its records cannot be sent: OSError: [Errno 28] No space left on device"
    assert error == RankError(3, said, consequence=False)


def test_a_full_disk_under_a_ranks_log(store, channel, tmp_path, monkeypatch) -> None:
    """Its own log cannot take the traceback: the reason reaches the monitor all the same."""

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("sys.stderr", Full())
    monkeypatch.setattr("ashl.run.rank.train_rank", lambda *_: 1 / 0)
    plan = planned("cluster=homogeneous", "sync=asp", "runtime=local")
    settings = RankSettings(1, "all", tmp_path)
    monkeypatch.setattr("ashl.run.rank.redirect", lambda path: None)
    assert run_rank(settings, plan.to_json(), store).code == 1
    errors = [record for record, _ in received(channel) if isinstance(record, RankError)]
    assert errors == [RankError(1, "ZeroDivisionError: division by zero", consequence=False)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_a_rank_that_waits_for_the_end_of_the_run(
    number: signal.Signals, store, channel, monkeypatch
) -> None:
    """The rank reported a failure after its exit; at SIGTERM the signal ended it."""

    def raise_exit(end: End) -> None:
        raise SystemExit(end.code)

    def interrupt() -> None:
        wait_for(lambda: channel._inbox)
        os.kill(os.getpid(), number)

    monkeypatch.setattr("ashl.run.rank.exit_process", raise_exit)
    monkeypatch.setattr("ashl.run.rank.train_rank", lambda *_: None)
    plan = planned("cluster=homogeneous", "sync=asp", "runtime=local")
    threading.Thread(target=interrupt).start()
    with pytest.raises(SystemExit) as ended:
        run_rank(RankSettings(1, "all"), plan.to_json(), store)
    assert ended.value.code == 130
    assert [record for record, _ in received(channel)] == [ProcessExited(1)]


def test_records_of_an_earlier_incarnation_are_dropped(store, channel) -> None:
    """A worker may end right after its report; its next incarnation has not rejoined by that."""
    store.call("report", 1, 1, [as_fields(WorkerRejoined(1, 0))], b"")
    channel.incarnations[1] = 2
    assert received(channel) == []
    store.call("report", 1, 2, [as_fields(WorkerRejoined(1, 5))], b"")
    assert received(channel) == [(WorkerRejoined(1, 5), None)]


def test_a_request_for_a_place_is_withdrawn_when_its_process_waits_no_longer(
    server, store, monkeypatch
) -> None:
    """The controller may evaluate meanwhile. The place went to no process, and stayed taken until
    the heartbeat timeout.
    """
    monkeypatch.setattr("ashl.run.handshake.PATIENCE_S", 0.05)
    requests = PlaceRequests(server, make_hello(0))
    assert request_place(store, make_hello()) is None
    assert len(requests.pending) == 1
    answer_requests(cast("Any", SimpleNamespace(requests=requests)))
    assert not requests.pending


def test_a_process_that_ends_before_its_first_report_gives_its_place_back(
    server, store, channel
) -> None:
    """The place stayed taken until the heartbeat timeout."""
    requests = PlaceRequests(server, make_hello(0))
    requests.places = {1: Place(RankSettings(1))}
    asks = threading.Thread(target=request_place, args=(store, make_hello(1)))
    asks.start()
    wait_for(lambda: requests.pending)
    answer_requests(cast("Any", SimpleNamespace(requests=requests, channel=channel)))
    asks.join()
    assert not channel.is_closed(1)
    store.close()
    wait_for(lambda: channel.is_closed(1))


def test_a_rank_sends_heartbeats_while_it_receives_its_part_of_a_checkpoint(
    server, store, channel, monkeypatch
) -> None:
    """A part of many gigabytes looked like missing heartbeats, and ended the resumed run."""
    monkeypatch.setattr("ashl.run.control_channel.EVERY_S", 0.001)
    reports = [0]
    report = server.handlers["report"]

    def count(*args: Any) -> Any:
        reports.append(reports[-1] + 1)
        return report(*args)

    def answer_late() -> int:
        before = reports[-1]
        wait_for(lambda: reports[-1] > before + 1, 5)
        return 7

    server.handlers |= {"report": count, "restore": answer_late}
    made = Reporter(store, 3, rounds="all")
    assert store.call_apart("restore") == 7
    made.close()
