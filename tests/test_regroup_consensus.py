"""The consensus of the survivors of a process group, without any process."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ashl.errors import AshlError
from ashl.runtime import collectives
from ashl.runtime.effects import CollectiveAborted, Formed, Regroup
from ashl.runtime.regroup_consensus import RegroupConsensus, join_key
from ashl.runtime.rendezvous import make_group
from tests.disturbed import wait_for


class Store:
    def another(self) -> "Store":
        return self


class Work:
    """A collective that ends just after a look at it was over, well or with an error."""

    def __init__(self, error: str | None) -> None:
        self.looks, self.error = 0, error

    def wait(self, timeout: object = None) -> None:
        self.looks += 1
        if self.looks == 1:
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)

    def is_completed(self) -> bool:
        return True


def test_what_ends_as_a_look_is_over_has_ended() -> None:
    consensus = RegroupConsensus(Store(), 0, (0, 1), [].append)
    consensus.wait((0, 1), Work(None))
    with pytest.raises(RuntimeError, match="closed by peer"):
        consensus.wait((0, 1), Work("closed by peer"))


def test_a_failed_member_of_a_group_that_others_have_formed() -> None:
    consensus = RegroupConsensus(Store(), 0, (0, 1, 2), [].append)
    consensus.mark_failed(1)
    consensus.mark_connected(1, 1)
    assert consensus.failed_of((0, 1)) == {1}, "it is one of its first life"
    assert consensus.failed_of((0, 1), (0, 1)) == frozenset()
    assert consensus.await_failure((0, 1), RuntimeError()) == CollectiveAborted(1)
    consensus.mark_failed(1, 1)
    assert consensus.failed_of((0, 1, 2), (0, 1, 0)) == {1}


def test_a_sum_by_groups_of_two() -> None:
    """Where two know that the third is lost, they do not wait for it, nor for what the other would
    say.
    """
    pairs, store = [(0, 1), (0, 2), (1, 2)], dist.HashStore()

    def member(rank: int) -> tuple[Tensor, str]:
        mine = [(pair, pair.index(rank)) for pair in pairs if rank in pair]
        ways = {pair[1 - at]: (make_group(f"{pair}", store, at), 1 - at) for pair, at in mine}
        whole = collectives.all_reduce_subset(
            torch.full((5,), 10.0**rank), (0, 1, 2), rank, 7, ways
        )
        with pytest.raises(RuntimeError) if rank < 2 else nullcontext() as caught:
            if rank < 2:
                collectives.all_reduce_subset(torch.ones(5), (0, 1, 2), rank, 7, ways, {2})
        return whole, str(caught and caught.value)

    with ThreadPoolExecutor(3) as threads:
        found = [*threads.map(member, range(3))]
    assert all(torch.equal(total, torch.full((5,), 111.0)) for total, _ in found)
    assert [why for _, why in found] == ["rank 2 has failed", "rank 2 has failed", "None"]


class Stores:
    """The job's store, for threads."""

    def __init__(self) -> None:
        self.store = dist.HashStore()

    def another(self) -> dist.Store:
        return self.store


def members(
    ranks: Iterable[int], stores: Stores, incarnations: dict[int, int] | None = None
) -> dict[int, RegroupConsensus]:
    made = {
        rank: RegroupConsensus(
            stores, rank, (0, 1, 2), [].append, (incarnations or {}).get(rank, 0)
        )
        for rank in ranks
    }
    for consensus in made.values():
        consensus._group = lambda: None  # type: ignore[method-assign]
    return made


def regrouped(asks: dict[RegroupConsensus, Regroup]) -> list[Formed]:
    """Return their decisions when all ask at once."""
    with ThreadPoolExecutor(len(asks)) as threads:
        found = [
            threads.submit(consensus.regroup, asked, lambda: 7) for consensus, asked in asks.items()
        ]
        return [one.result(10)[0] for one in found]


def test_a_loss_a_return_and_the_end() -> None:
    stores = Stores()
    zero, _, two = members((0, 1, 2), stores).values()
    zero.mark_failed(1)
    assert not zero.join_pending
    formed = regrouped({zero: Regroup(5), two: Regroup(4)})  # one has noticed, one is a merge ahead
    assert formed == [Formed(2, (0, 2), 4, 0, (1,), (), 7, (0, 0))] * 2

    (back,) = members((1,), stores, {1: 1}).values()
    for other in (zero, two):
        other.mark_connected(1, 1)
        assert other.join_pending
    early = regrouped({zero: Regroup(6, 0, True), two: Regroup(6, 0, True)})
    assert early[0].joined == (), "it has not knocked"
    assert early[0].ranks == (0, 2)
    with ThreadPoolExecutor(1) as thread:
        waits = thread.submit(back.regroup, Regroup(-1), lambda: 7)
        wait_for(lambda: stores.store.check([join_key(1, 1)]), 10)
        formed = regrouped({zero: Regroup(7, 0, True), two: Regroup(7, 0, True)})
        assert (
            waits.result(10)[0]._replace(failed=())
            == formed[0]
            == Formed(4, (0, 1, 2), 7, 0, (), (1,), 7, (0, 1, 0))
        )
    assert not any((zero.join_pending, zero.failed, back.failed))

    # for example, the rank that should give it the model has failed
    with ThreadPoolExecutor(1) as thread:
        waits = thread.submit(back.regroup, Regroup(-1), lambda: 7)
        assert [found.ranks for found in regrouped({zero: Regroup(7), two: Regroup(7)})] == [
            (0, 2)
        ] * 2
        assert zero.join_pending
        assert regrouped({zero: Regroup(8, 0, True), two: Regroup(8, 0, True)})[0].joined == (1,)
        assert waits.result(10)[0].ranks == (0, 1, 2)


def test_who_comes_when_the_run_is_over_or_nobody_has_the_model() -> None:
    stores = Stores()
    zero, _, two = members((0, 1, 2), stores).values()
    zero.mark_failed(1)
    assert [found.signal for found in regrouped({zero: Regroup(5, 2), two: Regroup(5, 2)})] == [
        2,
        2,
    ]
    (late,) = members((1,), stores, {1: 1}).values()
    assert late.regroup(Regroup(-1), lambda: 7)[0].signal == 2
    (alone,) = members((1,), Stores(), {1: 1}).values()
    alone.mark_failed(0)
    alone.mark_failed(2)
    with pytest.raises(AshlError, match="0 of 3 workers remain that have the model"):
        alone.regroup(Regroup(-1), lambda: 7)
