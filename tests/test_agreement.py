"""How those who are left of a team agree, apart from any process."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from ashl.errors import AshlError
from ashl.runtime.agreement import Agreement, knock
from ashl.runtime.effects import Formed, Regroup
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
    agreement = Agreement(Store(), 0, (0, 1), [].append)
    agreement.wait((0, 1), Work(None))
    with pytest.raises(RuntimeError, match="closed by peer"):
        agreement.wait((0, 1), Work("closed by peer"))


class Stores:
    """The job's store, for threads."""

    def __init__(self) -> None:
        self.store = dist.HashStore()

    def another(self) -> dist.Store:
        return self.store


def members(ranks: Iterable[int], stores: Stores, lives: dict[int, int] | None = None) -> dict[int, Agreement]:
    made = {rank: Agreement(stores, rank, (0, 1, 2), [].append, (lives or {}).get(rank, 0)) for rank in ranks}
    for agreement in made.values():
        agreement._group = lambda: None  # type: ignore[method-assign]
    return made


def regrouped(asks: dict[Agreement, Regroup]) -> list[Formed]:
    """What they come to when all ask at once."""
    with ThreadPoolExecutor(len(asks)) as threads:
        found = [threads.submit(agreement.regroup, asked, lambda: 7) for agreement, asked in asks.items()]
        return [one.result(10)[0] for one in found]


def test_a_loss_a_return_and_the_end() -> None:
    stores = Stores()
    zero, _, two = members((0, 1, 2), stores).values()
    zero.lose(1)
    assert not zero.knocks
    formed = regrouped({zero: Regroup(5), two: Regroup(4)})  # one has noticed, one is a merge ahead
    assert formed == [Formed(2, (0, 2), 4, 0, (1,), (), 7)] * 2

    (back,) = members((1,), stores, {1: 1}).values()
    for other in (zero, two):
        other.meet(1, 1)
        assert other.knocks
    early = regrouped({zero: Regroup(6, 0, True), two: Regroup(6, 0, True)})
    assert early[0].came == (), "it has not knocked"
    assert early[0].ranks == (0, 2)
    with ThreadPoolExecutor(1) as thread:
        waits = thread.submit(back.regroup, Regroup(-1), lambda: 7)
        wait_for(lambda: stores.store.check([knock(1, 1)]), 10)
        formed = regrouped({zero: Regroup(7, 0, True), two: Regroup(7, 0, True)})
        assert waits.result(10)[0]._replace(lost=()) == formed[0] == Formed(4, (0, 1, 2), 7, 0, (), (1,), 7)
    assert not any((zero.knocks, zero.lost, back.lost))

    with ThreadPoolExecutor(1) as thread:  # who was to give it the model is lost, say
        waits = thread.submit(back.regroup, Regroup(-1), lambda: 7)
        assert [found.ranks for found in regrouped({zero: Regroup(7), two: Regroup(7)})] == [(0, 2)] * 2
        assert zero.knocks
        assert regrouped({zero: Regroup(8, 0, True), two: Regroup(8, 0, True)})[0].came == (1,)
        assert waits.result(10)[0].ranks == (0, 1, 2)


def test_who_comes_when_the_run_is_over_or_nobody_has_the_model() -> None:
    stores = Stores()
    zero, _, two = members((0, 1, 2), stores).values()
    zero.lose(1)
    assert [found.word for found in regrouped({zero: Regroup(5, 2), two: Regroup(5, 2)})] == [2, 2]
    (late,) = members((1,), stores, {1: 1}).values()
    assert late.regroup(Regroup(-1), lambda: 7)[0].word == 2
    (alone,) = members((1,), Stores(), {1: 1}).values()
    alone.lose(0)
    alone.lose(2)
    with pytest.raises(AshlError, match="0 of 3 workers are left that have the model"):
        alone.regroup(Regroup(-1), lambda: 7)
