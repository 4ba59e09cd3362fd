"""Contracts of rules and topologies, and counts of progress.

A contract is checked when an option is made, nothing is ignored, and two calls of a method return
the same answer.
"""

import random
import sys
from types import ModuleType
from typing import Any, ClassVar

import pytest

from ashl.config.catalog import catalog, target
from ashl.config.construct import BASE_CLASSES, construct, import_target
from ashl.errors import UsageError
from ashl.option import Count, option, refuse_wrong_hooks
from ashl.stage.contract import Rule, Topology
from ashl.stage.progress import Progress
from ashl.sync.ssp import SSP
from ashl.topology.all_reduce import AllReduce
from ashl.topology.parameter_server import BarrierRule, ParameterServer, ServerRule
from tests.support import simulated
from tests.swarm.drawn import bound, drawn_cluster, drawn_limits, run


@pytest.fixture
def mine(monkeypatch) -> ModuleType:
    """A module of a user's own, which `_target_` may name."""
    module = ModuleType("mine")
    monkeypatch.setitem(sys.modules, "mine", module)
    return module


def made(module: ModuleType, cls: type, where: str, **fields: Any) -> Any:
    """The option, as a configuration makes it."""
    cls.__module__, cls.__qualname__ = "mine", cls.__name__
    setattr(module, cls.__name__, cls)
    return construct({"_target_": f"mine.{cls.__name__}", **fields}, where, ("mine",))


def test_every_shipped_option_says_what_is_asked_for() -> None:
    for group in BASE_CLASSES:
        for file in catalog()[group].values():
            cls = import_target(target(file), group, ())
            assert cls._group == group, file
            refuse_wrong_hooks(cls, group)


@pytest.mark.parametrize("name", ["quorom", "observes", "lr_scal", "averges", "extra"])
def test_nothing_that_a_rule_says_is_ignored(name: str, mine) -> None:
    cls = type("Mine", (ServerRule,), {name: lambda self: 1})
    with pytest.raises(UsageError, match=f"{name!r} is not known"):
        made(mine, option(cls), "sync")


def test_a_hook_that_is_misspelt_in_a_mixin_is_refused(mine) -> None:
    mixin = type("Mixin", (), {"next_assignments": lambda self: None})
    with pytest.raises(
        UsageError, match="'next_assignments' is not known; did you mean 'next_assignment'"
    ):
        made(mine, option(type("Mine", (mixin, ServerRule), {})), "sync")


def test_a_method_is_no_value_and_a_field_no_method(mine) -> None:
    """`averages()` was true for every value."""
    with pytest.raises(UsageError, match="'averages' is a method, not a value; make it a property"):
        made(mine, option(type("Mine", (ServerRule,), {"averages": lambda self: False})), "sync")

    class Field(ServerRule):
        quorum: Count  # type: ignore[assignment]

    with pytest.raises(UsageError, match="its field 'quorum' has the name of a method"):
        made(mine, option(Field), "sync", quorum=2)


@pytest.mark.parametrize(
    "hook", [2, property(lambda self: 2), staticmethod(lambda: 2), classmethod(lambda cls: 2)]
)
def test_what_cannot_be_asked_is_no_hook(hook: Any, mine) -> None:
    with pytest.raises(
        UsageError, match=r"'quorum' cannot be called; write it as quorum\(self, num_workers\)"
    ):
        made(mine, option(type("Mine", (ServerRule,), {"quorum": hook})), "sync")


def test_nobody_awaits_an_answer(mine) -> None:
    class Mine(ServerRule):
        async def may_proceed(self, state: Any, progress: Progress) -> Any:  # type: ignore[override]
            return progress.waiting

    with pytest.raises(UsageError, match="'may_proceed' cannot be called"):
        made(mine, option(Mine), "sync")


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        ("exchange", "gradiant", "'gradient', 'difference' or 'accumulated'"),
        ("local_steps", "plans", "a valid integer or 'plan'"),
        ("local_steps", 0, "greater than or equal to 1"),
        ("estimator", "svgr", "'minibatch', 'full' or 'svrg'"),
        ("averages", "no", "a valid boolean"),
    ],
)
def test_a_value_is_one_of_those_that_there_are(name: str, value: Any, right: str, mine) -> None:
    """A misspelt value was taken for another one."""
    with pytest.raises(UsageError, match=rf"{name}='?{value}'? is not possible: should be {right}"):
        made(mine, option(type("Mine", (ServerRule,), {name: value})), "sync")


def test_what_is_for_its_own_use_is_a_rules_own(mine) -> None:
    class Mine(BarrierRule):
        def _helper(self) -> int:
            return 1

    assert made(mine, option(Mine), "sync")._helper() == 1


def test_a_class_of_another_kind_is_refused(mine) -> None:
    class Mine:
        exchange: ClassVar[str] = "difference"

    with pytest.raises(
        UsageError, match=r"which is no sync: it has to extend the rule class of its topology"
    ):
        made(mine, option(Mine), "sync")


def test_a_topology_says_what_it_carries(mine) -> None:
    class Relay(Topology):
        policy_type: ClassVar[type[Rule]] = ServerRule

    with pytest.raises(
        UsageError, match=r"topology names 'mine\.Relay'; it does not define 'supports'"
    ):
        made(mine, option(Relay), "topology")


def test_what_a_topology_does_not_carry_is_refused(monkeypatch) -> None:
    """It was compressed by nobody, and ended with exit code 0."""
    monkeypatch.setattr(AllReduce, "supports", frozenset())
    with pytest.raises(UsageError, match="compression=topk: needs compressed updates"):
        simulated("topology=all_reduce", "sync=bsp", "schedule=single", "compression=topk")
    with pytest.raises(UsageError, match=r"aggregate\.scale=2\.0: needs a weighted merge"):
        simulated("topology=all_reduce", "sync=bsp", "schedule=single", "aggregate.scale=2")


def test_a_topology_cannot_carry_what_there_is_not(monkeypatch) -> None:
    monkeypatch.setattr(AllReduce, "supports", frozenset({"weigths"}))
    with pytest.raises(
        UsageError,
        match=r"supports=frozenset\({'weigths'}\) is not possible: should be 'codec', 'weights'",
    ):
        simulated("topology=all_reduce", "sync=bsp", "schedule=single")


def test_a_field_in_place_of_a_class_variable_is_required(mine) -> None:
    """Defaults stand in YAML: what the base says must not slip in where a file lacks the line."""

    @option
    class Mine(ServerRule):
        local_steps: Count

    with pytest.raises(UsageError, match=r"sync\.local_steps is missing"):
        made(mine, Mine, "sync")
    assert made(mine, Mine, "sync", local_steps=3).local_steps == 3


class AsksTwice(SSP):
    """A copy of SSP that asks other questions first and ignores their answers."""

    def may_proceed(self, state: Any, progress: Progress) -> list[int]:
        progress.waiting_without_merge()
        progress.workers_within_staleness(self.staleness)
        return super().may_proceed(state, progress)


class BarrierTwice(BarrierRule):
    def may_proceed(self, state: Any, progress: Progress) -> Any:
        return [
            rank
            for rank in progress.waiting_without_merge()
            if rank in progress.waiting_without_merge() and progress.waiting
        ]


@pytest.mark.parametrize("seed", range(10))
def test_a_rule_may_ask_twice(seed: int) -> None:
    """A question that changed the next answer let nobody go on: a deadlock."""
    for plain, twice in (
        (SSP(staleness=seed % 3, local_steps=1), AsksTwice(staleness=seed % 3, local_steps=1)),
        (BarrierRule(), BarrierTwice()),
    ):
        seen = []
        for rule in (plain, twice):
            rng = random.Random(seed)
            cluster = drawn_cluster(rng)
            topology = ParameterServer(pull_ratio=None)
            stage = bound(rng, rule, topology, cluster.num_workers, drawn_limits(rng))
            seen.append(run(cluster, (stage,), seed)[1])
        assert seen[0].records == seen[1].records


@pytest.mark.parametrize("seed", range(40))
def test_a_tally_answers_as_counting_does(seed: int) -> None:
    """The answers about waiting workers, and `slowest` and `fastest`, match their definitions in any
    order of events.
    """
    rng = random.Random(seed)
    n = rng.randint(1, 6)
    progress = Progress(n)
    for _ in range(60):
        computing = [rank for rank in range(n) if rank not in progress.waiting]
        what = rng.choice(["arrive", "commit", "merge", "release", "begin"])
        if what == "arrive" and computing:
            progress.start_waiting(rng.choice(computing), rng.randint(0, 3), rng.random() < 0.3)
        elif what == "commit":
            progress.commit(rng.randrange(n), 1, 8)
        elif what == "merge":
            progress.merge()
        elif what == "release" and progress.waiting:
            progress.release(rng.choice(sorted(progress.waiting)))
        elif what == "begin" and not progress.waiting and rng.random() < 0.2:
            progress.begin(1.0)
        bound = rng.choice([0, 1, 3])
        assert (progress.slowest, progress.fastest) == (min(progress.clocks), max(progress.clocks))
        for _twice in range(2):
            assert set(progress.waiting_without_merge()) == {
                rank
                for rank, (_, late) in progress.waiting.items()
                if late or progress.pulled[rank] < progress.version
            }
            ahead = {
                rank
                for rank in progress.waiting
                if progress.clocks[rank] <= min(progress.clocks) + bound
            }
            assert set(progress.workers_within_staleness(bound)) == ahead
            assert set(progress.workers_within_staleness(float("inf"))) == set(progress.waiting)
