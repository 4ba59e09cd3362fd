"""A (re)joining worker is admitted at each of its peers, in any state of theirs: with a stand-in
store and groups.
"""

import queue
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ashl.run import membership_listener as room
from ashl.run.membership_listener import MembershipListener
from ashl.runtime import rendezvous
from ashl.runtime.effects import PEER_FAILED
from ashl.runtime.process import TorchKernel
from ashl.runtime.records import ControlUpdate, PeerUnreachable
from ashl.runtime.rendezvous import Entry, admit_worker, join_running_job, known_key, pair_key
from tests.kernels import Quiet

ANEW = ControlUpdate(ready=((1, 1),))


class Store:
    """Data that the threads of a job share, in one process."""

    def __init__(self) -> None:
        self.known: dict[str, str] = {}

    def another(self) -> Any:
        return self

    def set(self, key: str, value: str) -> None:
        self.known[key] = value

    def get(self, key: str) -> bytes:
        return self.known[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.known for key in keys)


class Silent:
    """A group whose other member says nothing, or is gone."""

    def __init__(self, gone: bool = False) -> None:
        self.gone, self._over = gone, queue.SimpleQueue[None]()

    def send(self, *_: object) -> Any:
        return self

    recv = send

    def wait(self) -> None:
        if self.gone:
            raise RuntimeError("Connection closed by peer")
        self._over.get()


def kernel_of(seen: Quiet, peers: tuple[int, ...] = ()) -> TorchKernel:
    pace: Any = SimpleNamespace(schedule_arrival=lambda *_: 0, speed=None)
    return TorchKernel(0, seen, lambda _: pace, peers, 1000, exact=True, groups={})


def all_let_in() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("connect-"):
            thread.join(5)


def test_a_second_joining_worker_is_admitted_once_the_first_has_its_links(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, kernel = Store(), kernel_of(Quiet())
    monkeypatch.setattr(room, "admit_worker", lambda *_: Silent())
    kernel.join_running(Entry({}, {}, time.monotonic_ns()))
    listener = MembershipListener(kernel, 0, 1, {1: 0}, cast("Any", store))
    listener.on_membership(ANEW)  # between its coming in and its first message
    all_let_in()
    known = known_key(pair_key(0, 1, 1))
    assert known not in store.known

    async def main(_: Any) -> bool:
        listener.on_membership(ANEW)  # the controller repeats it
        all_let_in()
        return known in store.known

    assert kernel.run(main)


def test_a_failure_before_a_rank_has_its_links_is_a_failure_there_too() -> None:
    kernel = kernel_of(Quiet(), (1,))
    kernel.join_running(Entry({1: cast("Any", Silent())}, {1: 0}, time.monotonic_ns()))
    listener, over = (
        MembershipListener(kernel, 0, 1, {1: 0}, cast("Any", Store())),
        ControlUpdate(lost=((1, 0),)),
    )
    listener.on_membership(over)

    async def main(ctx: Any) -> str:
        listener.on_membership(over)
        return (await ctx.recv(PEER_FAILED, before_s=5.0)).tag[0]

    assert kernel.run(main) == "lost"


def test_a_joining_worker_knows_the_incarnations_of_its_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Home takes only the word on a present life that a link to it is broken."""
    store, seen = cast("Any", Store()), Quiet()
    said: list[Any] = []
    monkeypatch.setattr(seen, "emit", said.append)
    monkeypatch.setattr(rendezvous, "make_group", lambda *_: Silent(gone=True))
    admit_worker(store, 1, 2, 0, 1, lambda: 5)  # rank 1 has rejoined twice
    store.set(known_key(pair_key(1, 0, 1)), "")
    entry = join_running_job(store, [1], 0, 1, lambda: ControlUpdate(ready=((0, 1),)))
    assert entry is not None
    kernel = kernel_of(seen, (1,))
    kernel.join_running(entry)

    async def main(ctx: Any) -> None:
        await ctx.recv(PEER_FAILED, before_s=5.0)

    kernel.run(main)
    assert [record for record in said if isinstance(record, PeerUnreachable)] == [
        PeerUnreachable(0, 1, 2)
    ]
