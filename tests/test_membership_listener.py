"""A joining worker is admitted at its servers, and its failure arrives there: with a stand-in
store and groups.
"""

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ashl.errors import AshlError
from ashl.run.authenticated_store import StoreAddress, StoreClient, StoreServer, new_secret
from ashl.run.checkpoints import RestorePoint
from ashl.run.membership_listener import MembershipListener
from ashl.run.rank import restore
from ashl.runtime import rendezvous
from ashl.runtime.effects import PEER_FAILED, Epoch, Message
from ashl.runtime.plain_state import encode
from ashl.runtime.process import TorchKernel
from ashl.runtime.rank_checkpoint import PAUSES
from ashl.runtime.records import ControlUpdate, End
from ashl.runtime.rendezvous import (
    JOINER,
    SERVER,
    admit_worker,
    init_process_groups,
    join_servers,
    make_epoch_group,
)
from ashl.runtime.transport import ReceivedMessage
from ashl.topology.local_work import WorkerState
from tests.disturbed import wait_for
from tests.kernels import Quiet


class Store:
    """Data that the threads of a job share, in one process."""

    def __init__(self) -> None:
        self.known: dict[str, str] = {}

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


def kernel_of(seen: Quiet, peers: tuple[int, ...] = (), **options: Any) -> TorchKernel:
    pace: Any = SimpleNamespace(schedule_arrival=lambda *_: 0, speed=None)
    return TorchKernel(0, seen, lambda _: pace, peers, 1000, exact=True, groups={}, **options)


def test_a_failure_before_a_rank_has_its_connections_arrives_afterwards() -> None:
    kernel = kernel_of(Quiet(), (1,))
    kernel.join_running({1: cast("Any", Silent())}, time.monotonic_ns())
    listener = MembershipListener(kernel, [1], cast("Any", Store()))
    over = ControlUpdate(failed=((1, 0),))
    listener.on_membership(over)

    async def main(ctx: Any) -> str:
        listener.on_membership(over)  # the controller repeats it
        return (await ctx.recv(PEER_FAILED, before_s=5.0)).tag[0]

    assert kernel.run(main) == "failed"


def test_a_joining_worker_begins_its_first_epoch_once() -> None:
    """It numbers its checkpoints as the other members of the epoch do."""
    numbers: list[int] = []
    writer = SimpleNamespace(every_s=1.0, save=lambda *given: numbers.append(given[-1]))
    kernel = kernel_of(Quiet(), make_group=lambda *_: None, checkpoint_writer=writer)
    kernel.ctx.incarnation = 1
    listener = MembershipListener(kernel, [], cast("Any", Store()), regroups=True)
    update = ControlUpdate(epoch=Epoch(2, (0,), (1,)))
    begun: list[int] = []

    async def main(ctx: Any, saved: Any, epoch: Epoch) -> None:
        begun.append(epoch.number)
        listener.on_membership(update)  # every answer repeats it
        await ctx.sleep(0.0)
        for _ in range(2):
            await ctx.save(0, None)

    kernel.join_running({}, time.monotonic_ns())
    kernel.begin_epoch(update.epoch)
    kernel.run(main)
    assert begun == [2]
    assert numbers == [2 * PAUSES, 2 * PAUSES + 1]
    assert kernel.heartbeat().first_pause == 2 * PAUSES


@pytest.mark.parametrize("has_next", [True, False])
def test_a_rendezvous_that_fails_waits_for_the_next_epoch(
    has_next: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member has failed, and the controller notices it after its evaluation, or never."""
    monkeypatch.setattr("ashl.runtime.process.FAILURE_WAIT_S", 0.1)

    def meet(epoch: Epoch, *_: object) -> None:
        if epoch.number == 1:
            raise RuntimeError("Connection refused")

    async def main(ctx: Any, saved: Any, epoch: Epoch) -> int:
        return epoch.number

    kernel = kernel_of(Quiet(), make_group=meet)
    kernel.join_running({}, time.monotonic_ns())
    kernel.ctx.incarnation = 1
    listener = MembershipListener(kernel, [], cast("Any", Store()), regroups=True)
    first = ControlUpdate(epoch=Epoch(1, (0, 1), (1, 0)))
    listener.on_membership(first)

    def update(**known: Any) -> None:
        listener.on_membership(first._replace(supervised_s=5.0, **known))

    if has_next:
        threading.Timer(1.0, update, kwargs={"epoch": Epoch(2, (0,), (1,))}).start()
        assert kernel.run(main) == 2
    else:
        threading.Timer(0.3, update).start()
        with pytest.raises(RuntimeError, match="Connection refused"):
            kernel.run(main)


def test_a_rank_that_has_ended_waits_for_the_others_until_all_have() -> None:
    """Else the controller would not notice that another rank waits without result."""
    kernel = kernel_of(Quiet())
    kernel.join_running({}, time.monotonic_ns())

    async def main(ctx: Any) -> None:
        await ctx.sleep(0.0)

    assert kernel.heartbeat().waiting is None
    kernel.run(main)
    assert kernel.heartbeat().waiting == "has ended and waits for the other ranks"
    kernel.close_connections(1.0)
    assert kernel.heartbeat().waiting is None


def test_a_pause_does_not_hide_the_round_before() -> None:
    """Members that have missed the last merge before the pause go back to that round with all."""
    ctx = kernel_of(Quiet(), make_group=lambda *_: None).ctx
    for version in range(3):
        ctx.safe_point(0, WorkerState(None, None, version=version))
    after = WorkerState(None, None, version=3)
    ctx.mark_pause(0, after)
    ctx.safe_point(0, after)
    assert ctx.restart_point[1].version == 3
    assert ctx.before_restart_point[1].version == 2
    ctx.safe_point(0, WorkerState(None, None, version=4))
    assert ctx.before_restart_point[1].version == 3


def test_a_worker_without_a_part_and_without_a_heartbeat_was_down_until_the_checkpoint() -> None:
    kernel, plan = kernel_of(Quiet()), cast("Any", SimpleNamespace(allow_targets=()))
    point = RestorePoint(3_000_000_000, 7, (0,), encode(None))
    assert restore(kernel, point, plan, "cpu") is None
    totals = kernel.ctx.time_accounting.totals
    assert totals["down"] == sum(totals.values()) == 3_000_000_000


def test_a_joining_worker_takes_part_from_the_first_message_of_its_server_on() -> None:
    kernel = kernel_of(Quiet(), (1,))
    kernel.join_running({1: cast("Any", Silent())}, time.monotonic_ns())

    async def main(ctx: Any) -> int | None:
        for pauses in (4, 5):
            kernel._inbox.put(ReceivedMessage(Message(1, ("pull", 0, 0), None, (), 0), pauses))
        await ctx.recv(("pull", 0, 0))
        return kernel.heartbeat().first_pause

    assert kernel.heartbeat().first_pause is None
    assert kernel.run(main) == 4


def test_a_joining_worker_is_connected_to_its_server_with_the_clock_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = cast("Any", Store())
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        rendezvous, "make_group", lambda name, _, place, *__: made.append((name, place)) or "group"
    )
    assert join_servers(store, [2], 0, 1, lambda: True) is None, "the run ends before"
    admit_worker(store, 2, 0, 1, 5_000_000_000, lambda: False)
    joined = join_servers(store, [2], 0, 1, lambda: False)
    assert joined is not None
    groups, zero_ns = joined
    assert groups == {2: "group"}
    assert time.monotonic_ns() - zero_ns == pytest.approx(5e9, abs=1e9)
    assert made == [("pair/2/0/1", SERVER), ("pair/2/0/1", JOINER)]


@pytest.fixture
def job_store() -> Iterator[StoreClient]:
    secret = new_secret()
    with (
        closing(StoreServer(secret)) as server,
        closing(StoreClient(StoreAddress(server.host, server.port, secret), 0.0)) as client,
    ):
        yield client


def threads_named(*names: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name in names]


@pytest.mark.parametrize(
    "update", [ControlUpdate(failed=((1, 1),)), ControlUpdate(end=End(0))], ids=["failed", "over"]
)
def test_a_server_waits_no_longer_for_a_joining_worker_that_never_comes(
    update: ControlUpdate, job_store: StoreClient
) -> None:
    """Its threads would ask the store for the worker two hundred times a second."""
    failed: list[int] = []
    kernel = SimpleNamespace(
        has_started=True,
        ctx=SimpleNamespace(rank=2),
        now_ns=0,
        mark_peer_failed=lambda rank, _: failed.append(rank),
    )
    listener = MembershipListener(cast("Any", kernel), [1], job_store)
    listener.on_membership(ControlUpdate(failed=((1, 0),), ready=((1, 1),)))
    wait_for(lambda: threads_named("watched"))
    assert threads_named("connect-1")
    listener.on_membership(update)
    wait_for(lambda: not threads_named("watched", "connect-1"), 5.0)
    assert failed == [1] * (1 + len(update.failed))


def test_the_rendezvous_of_an_epoch_ends_with_the_epoch(job_store: StoreClient) -> None:
    began = time.monotonic()
    members = Epoch(1, (0, 1), (0, 0)), (0, 1)
    group = make_epoch_group(
        job_store, 0, lambda: 0, *members, lambda: time.monotonic() > began + 0.3
    )
    assert group is None
    wait_for(lambda: not threads_named("watched"), 5.0)


def test_ranks_that_gloo_does_not_connect_end_with_one_sentence(job_store: StoreClient) -> None:
    """Behind a firewall they waited forever. The time begins when all ranks are ready."""
    job_store.set("ready/1", "")
    said = r"gloo does not connect to all other ranks \(.*\); allow .* another runtime.interface"
    with pytest.raises(AshlError, match=said):
        init_process_groups("gloo", job_store, 0, 2, 0.1)
