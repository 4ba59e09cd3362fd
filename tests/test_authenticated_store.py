"""A job's store under its secret: every entry of an untrusted client is ignored or raises an error."""

import json
from collections.abc import Callable, Iterator

import hypothesis.strategies as st
import pytest
import torch.distributed as dist
from hypothesis import given, settings

from ashl.errors import AshlError, plain
from ashl.run.authenticated_store import (
    FROM,
    HASH_BYTES,
    AuthenticatedStore,
    new_secret,
    shared_secret,
)
from ashl.runtime.control_messages import ControlUpdate, End
from ashl.runtime.records import KINDS, Alive, ProfileMeasured, dumps, loads

SECRET = new_secret()


@pytest.fixture(scope="module")
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def store(server) -> AuthenticatedStore:
    return AuthenticatedStore(server, SECRET)


def items(server: dist.TCPStore, store: AuthenticatedStore, queue: str, *raw: bytes) -> None:
    """Put there by somebody who knows a queue's name all the same."""
    for item in raw:
        store._store.queue_push(store._name(queue), item)


def taken(server: dist.TCPStore, store: AuthenticatedStore, queue: str) -> bytes:
    """An item as it lies in the store."""
    return store._store.queue_pop(store._name(queue), False)


def test_what_others_put_into_a_queue_is_passed_over_and_counted(server, store) -> None:
    store.push("a", 3, b"first")
    old = taken(server, store, "a")
    flipped = old[:-1] + bytes([old[-1] ^ 1])
    elsewhere = AuthenticatedStore(server, new_secret())
    elsewhere.push("a", 3, b"of another secret")
    foreign = taken(server, elsewhere, "a")
    store.push("b", 3, b"of another queue")
    moved = taken(server, store, "b")
    impostor = old[:HASH_BYTES] + FROM.pack(4, 1) + b"first"
    items(server, store, "a", b"", b"x", flipped, old, old, foreign, moved, impostor)
    store.push("a", 3, b"second")
    items(server, store, "a", old)
    assert [store.pop("a"), store.pop("a"), store.pop("a")] == [(3, b"first"), (3, b"second"), None]
    assert store.refused == 8


def test_queues_are_not_listed_and_keys_are_checked(server, store) -> None:
    store.push("hidden", 0, b"")
    store.set("key", "ä")
    store.set("other", b"\xff\x00")
    assert (store.get("key").decode(), store.get("other")) == ("ä", b"\xff\x00")
    names = server.list_keys()
    assert not [name for name in names if store._name("hidden") in name or "hidden" in name]
    (key,) = (name for name in names if name.endswith("/key"))
    (other,) = (name for name in names if name.endswith("/other"))
    for forged in ("", "1", server.get(other)):
        server.set(key, forged)
        with pytest.raises(AshlError, match="a value that no process of this job has written"):
            store.get("key")
    server.set(key, "x")
    with pytest.raises(AshlError, match="a value that no process of this job has written"):
        store.compare_set("key", "", "mine")


def test_what_is_changed_if_nobody_else_has(server, store) -> None:
    assert store.compare_set("c", "", "one") == b"one"
    assert store.compare_set("c", "", "two") == b"one"
    assert store.compare_set("c", "one", "two") == b"two"
    assert AuthenticatedStore(server, SECRET).get("c") == b"two"


def test_where_a_secret_comes_from(monkeypatch) -> None:
    monkeypatch.delenv("ASHL_JOB_SECRET", raising=False)
    known = shared_secret("host", 29500)
    assert known == shared_secret("host", 29500) != shared_secret("host", 29501)
    monkeypatch.setenv("ASHL_JOB_SECRET", "a word")
    assert (
        known
        != shared_secret("host", 29500)
        == shared_secret("host", 29500)
        != shared_secret("host", 29501)
    )
    assert new_secret() != new_secret()
    assert "a secret" in repr({"secret": new_secret()}), "what holds one may be printed"


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
FIELDS = sorted({name for kind in KINDS.values() for name in kind._fields})
RECORD = st.builds(
    lambda kind, fields: json.dumps({"kind": kind, **fields}),
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


def read(parse: Callable[[str], object], line: str) -> tuple[object, str]:
    """Return the content of a line, or its error message."""
    try:
        return parse(line), ""
    except AshlError as error:
        return None, str(error)


@settings(max_examples=60)
@given(RECORD | st.text() | ANY.map(json.dumps) | st.binary())
def test_whatever_comes_is_a_record_or_one_plain_sentence(line) -> None:
    for parse in (loads, ControlUpdate.loads):
        found, sentence = read(parse, line)
        assert sentence.isprintable()
        assert isinstance(found, ProfileMeasured) or all(
            text.isprintable() for text in strings(found)
        )


@pytest.mark.parametrize("value", ["[" * 100_000, "9" * 5000 + "}", "\x00}"])
def test_what_no_parser_likes(value: str) -> None:
    with pytest.raises(AshlError, match="is not a record"):
        loads('{"kind":"exited","rank":' + value)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"alive", "ready", "exited"}))
def test_a_record_without_its_fields(kind: str) -> None:
    with pytest.raises(
        AshlError, match=f"a record of kind '{kind}' is invalid: .*: Field required"
    ):
        loads(json.dumps({"kind": kind, "rank": 0}))


def test_news_and_records_come_as_they_went() -> None:
    update = ControlUpdate(
        "stop.steps", {"test_loss": 0.5, "test_metric": None}, End(1, "worker 1 was killed")
    )
    assert ControlUpdate.loads(update.dumps()) == update
    assert ControlUpdate.loads(ControlUpdate().dumps()) == ControlUpdate()
    assert loads(dumps(Alive(3))) == Alive(3)


def test_text_from_elsewhere_is_shown_without_what_a_terminal_obeys() -> None:
    assert plain("a\x1b]0;title\x07b\r\nc\u202ed\x9b") == "a ]0;title b c d"
