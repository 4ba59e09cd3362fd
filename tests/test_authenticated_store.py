"""A job's store accepts only clients that know its secret; records are validated."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import timedelta
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from ashl.errors import AshlError, UsageError, to_one_line
from ashl.run.authenticated_store import (
    PENDING,
    SIZE,
    Secret,
    StoreAddress,
    StoreClient,
    StoreServer,
    new_secret,
    shared_secret,
)
from ashl.runtime.records import (
    KINDS,
    ControlUpdate,
    End,
    ProcessExited,
    ProfileMeasured,
    as_fields,
    record_of,
    validate,
)
from tests.disturbed import wait_for

SECRET = new_secret()


@pytest.fixture
def server() -> Iterator[StoreServer]:
    with closing(StoreServer(SECRET)) as made:
        yield made


def client(server: StoreServer, secret: Secret = SECRET) -> StoreClient:
    return StoreClient(StoreAddress(server.host, server.port, secret), 0.0)


def test_keys_and_requests_are_the_same_for_all(server) -> None:
    one, two, own = client(server), client(server), server
    one.set("key", "ä")
    own.call("set", "bytes", b"\xff\x00")
    assert (two.get("key").decode(), two.get("bytes")) == ("ä", b"\xff\x00")
    assert (two.check(["key"]), two.check(["key", "none"])) == (True, False)
    assert [one.compare_set("c", "", "one"), two.compare_set("c", "", "two")] == [b"one"] * 2
    assert two.compare_set("c", "one", "two") == own.call("get", "c") == b"two"
    assert (one.add("n", 2), two.add("n", 3), two.delete_key("n")) == (2, 5, True)
    with pytest.raises(RuntimeError, match=r"has no n after 0\.01 s"):
        two.wait(["n"], timedelta(milliseconds=10))
    big = bytes(9_000_000)
    assert one.call("twice", 3, memoryview(big)) is None, "no handler yet"
    own.handlers["twice"] = lambda n, content: [2 * n, len(content)]
    assert one.call("twice", 3, memoryview(big)) == own.call("twice", 3, big) == [6, len(big)]


def test_a_wait_does_not_hold_up_other_clients(server) -> None:
    one, two = client(server), client(server)
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(one.get("late")))
    thread.start()
    two.set("late", "x")
    thread.join(5)
    assert found == [b"x"]


def test_a_store_that_does_not_answer_ends_a_call(server, monkeypatch) -> None:
    """Ticks are counted: hours in which the process is stopped between two of them do not count."""
    store = client(server)
    store.limit_answers(0.3)
    server.handlers["slow"] = time.sleep
    assert store.call("slow", 0.2) is None
    assert store.call("slow", 0.2) is None, "each call has the whole time"
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 3600)
    assert store.call("slow", 0.2) is None
    said = rf"the job's store at 127.0.0.1:{server.port} did not answer for 0\.3 s"
    for limit_s in (5.0, 0.0):  # the second call fails at once
        began_s = clock()
        with pytest.raises(RuntimeError, match=said):
            store.call("slow", 5.0)
        assert clock() - began_s < limit_s + 0.2


ATTACKS = {
    "nothing": b"",
    "a short message": b"hello",
    "zeros": bytes(64),
    "a request": bytes(32) + bytes(32) + b"\0\0\0\0\0\0\0\x04abcd",
    "much": b"\xff" * 1_000_000,
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_client_without_the_secret_is_refused(
    attack: str, server, caplog: pytest.LogCaptureFixture
) -> None:
    """The store answers with a random number alone, and logs an address once."""
    mine = client(server)
    for _ in range(3):
        with (
            socket.create_connection((server.host, server.port), timeout=5) as connection,
            suppress(OSError),
        ):
            connection.sendall(ATTACKS[attack])
            connection.shutdown(socket.SHUT_WR)
            assert len(connection.recv(1 << 16)) <= 32
            assert connection.recv(1 << 16) == b""
    wait_for(lambda: server.refused == {"127.0.0.1"}, 5)
    refusals = [record for record in caplog.records if "does not know" in record.message]
    assert len(refusals) == 1
    mine.set("key", "still there")
    assert mine.get("key") == b"still there"


def test_another_secret_and_another_program(server) -> None:
    with pytest.raises(ConnectionError, match="closed"):
        client(server, new_secret())
    with socket.create_server(("127.0.0.1", 0)) as other:  # an impostor of the store
        port = other.getsockname()[1]

        def answer() -> None:
            connection = other.accept()[0]
            with connection:
                connection.sendall(bytes(64))
                connection.recv(1 << 10)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConnectionError):
            StoreClient(StoreAddress("127.0.0.1", port, SECRET), 0.0)
        thread.join()


def test_clients_that_wait_do_not_keep_others_out(server, monkeypatch) -> None:
    monkeypatch.setattr("ashl.run.authenticated_store.CHALLENGE_S", 0.2)
    idle = [socket.create_connection((server.host, server.port)) for _ in range(PENDING + 5)]
    store = StoreClient(StoreAddress(server.host, server.port, SECRET), 5.0)
    store.set("key", "here")
    assert store.get("key") == b"here"
    for connection in idle:
        connection.close()


def test_a_client_that_sends_byte_by_byte_has_no_more_time(server, monkeypatch) -> None:
    monkeypatch.setattr("ashl.run.authenticated_store.CHALLENGE_S", 0.3)
    link = socket.create_connection((server.host, server.port))
    began_s = time.monotonic()
    with link, suppress(OSError):
        while not server.refused:
            assert time.monotonic() < began_s + 3.0
            link.send(b"x")
            time.sleep(0.15)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_controller_learns_the_end_of_a_connection_after_any_error(server) -> None:
    closed = threading.Event()
    server.handlers["closed"] = closed.set
    one = client(server)
    one._connection.send(SIZE.pack(1) + b"5")  # a message is a list
    assert closed.wait(5)


@pytest.mark.parametrize("content", [b"5", b"[]", b"{", b'[{"$bytes": null}]'])
def test_a_message_that_is_no_request_closes_its_connection(server, content: bytes) -> None:
    own = client(server)
    own._connection.send(SIZE.pack(len(content)) + content)
    with pytest.raises(OSError, match="closed"):
        own._connection.receive_message()
    client(server).set("key", "value")


def test_a_store_outlives_a_moment_without_threads(server, monkeypatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(ConnectionError):
            client(server)
    client(server).set("key", "value")


def test_where_a_secret_comes_from(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ASHL_JOB_SECRET", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    known = shared_secret("host", 29500)
    assert known == shared_secret("host", 29500) != shared_secret("host", 29501)
    path = tmp_path / ".ashl/secret"
    assert [file.name for file in path.parent.iterdir()] == ["secret"]
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    with pytest.raises(UsageError, match="other users can read it; run `chmod 600"):
        shared_secret("host")
    monkeypatch.setenv("HOME", "/dev/null")
    with pytest.raises(UsageError, match=r"no secret can be kept there .*; set ASHL_JOB_SECRET"):
        shared_secret("host")
    monkeypatch.setenv("ASHL_JOB_SECRET", "a word")
    assert known != shared_secret("host", 29500) == shared_secret("host", 29500)
    assert new_secret() != new_secret()
    assert "a secret" in repr({"secret": new_secret()}), "what holds one may be printed"


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
FIELDS = sorted({name for kind in KINDS.values() for name in kind._fields})
RECORD = st.builds(
    lambda kind, fields: {"kind": kind, **fields},
    st.sampled_from(sorted(KINDS)),
    st.dictionaries(st.sampled_from(FIELDS), ANY, max_size=8),
)


def strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from strings([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from strings(inner)


def control_update(fields: object) -> ControlUpdate:
    return validate(ControlUpdate, fields, "a control update")


@settings(max_examples=60)
@given(RECORD | ANY)
def test_any_message_is_a_record_or_one_plain_sentence(fields) -> None:
    for parse in (record_of, control_update):
        try:
            found, sentence = parse(fields), ""
        except AshlError as error:
            found, sentence = None, str(error)
        assert sentence.isprintable()
        assert isinstance(found, ProfileMeasured) or all(
            text.isprintable() for text in strings(found)
        )


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"Ready", "ProcessExited", "StopAsked"}))
def test_a_record_without_its_fields(kind: str) -> None:
    with pytest.raises(
        AshlError, match=f"a record of kind '{kind}' is invalid: .*: Field required"
    ):
        record_of({"kind": kind, "rank": 0})


def test_records_and_control_updates_arrive_as_they_were_sent(server) -> None:
    ends = {"test_loss": 0.5, "test_metric": None}
    update = ControlUpdate("stop.steps", ends, End(1, "worker 1 was killed"))
    server.handlers["same"] = lambda *values: values
    content = {"a": [b"one", {"b": b"two"}], "c": {"kept": 3}}
    sent = [update, ControlUpdate(), as_fields(ProcessExited(3)), content]
    found = client(server).call("same", *sent)
    assert [control_update(fields) for fields in found[:2]] == sent[:2]
    assert record_of(found[2]) == ProcessExited(3)
    assert found[3] == content


def test_text_from_elsewhere_is_shown_without_what_a_terminal_obeys() -> None:
    assert to_one_line("a\x1b]0;title\x07b\r\nc\u202ed\x9b") == "a ]0;title b c d"
