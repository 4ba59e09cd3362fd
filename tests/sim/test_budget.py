"""A budget of seconds is one on every topology, and every evaluation that falls due is made,
however often.
"""

import pytest

from tests.support import Ran, simulated

SMALL = ("schedule=single", "cluster=mixed", "model.hidden=[8]", "stop.steps=null")
MODES = {
    "server": ("sync=local_sgd", "sync.local_steps=16"),
    "asynchronous": ("sync=asp",),
    "all_reduce": ("topology=all_reduce", "sync=local_sgd", "sync.local_steps=16"),
    "rounds": ("topology=gossip", "topology.graph=ring", "sync=d_psgd", "sync.local_steps=8"),
    "early": (
        "topology=gossip",
        "topology.graph=ring",
        "sync=d_psgd",
        "sync.local_steps=8",
        "sync.order=awc",
    ),
    "matchings": ("topology=gossip", "sync=matcha"),
    "pairs": ("topology=gossip", "sync=ad_psgd"),
    "groups": ("topology=partial_all_reduce", "sync=ripples_smart"),
    # the last request for an evaluation arrives after the end
    "slow links": (
        "topology=gossip",
        "sync=ad_psgd",
        "cluster.exchange_s=null",
        "cluster.bandwidth_mbit_s=20",
        "cluster.latency_s=0.25",
    ),
}


def evaluations(ran: Ran) -> list[float]:
    return [record["time_ns"] / 1e9 for record, _ in ran.snapshots if not record.get("final")]


@pytest.mark.parametrize("mode", MODES)
def test_the_clock_of_the_records_ends_with_the_budget(mode: str) -> None:
    """Local SGD by all-reduce with H = 64 ended at 19.2 s of 10, NoLoCo at 45.5 s."""
    ran = simulated(*SMALL, *MODES[mode], "stop.seconds=4.7", "eval.every_s=0.5")
    assert ran.end["reason"] == "seconds"
    assert ran.time_ns == 4_700_000_000
    assert {sum(totals.values()) for totals in ran.ledgers} == {4_700_000_000}
    assert max(evaluations(ran), default=0.0) <= 4.7


@pytest.mark.parametrize("mode", ["all_reduce", "rounds"])
def test_what_ends_later_does_not_count(mode: str) -> None:
    """The model is that of the steps that ended in time, bit for bit, where all ranks end their
    rounds at once.
    """
    equal = ("cluster=homogeneous",)
    late = simulated(*SMALL, *MODES[mode], *equal, "stop.seconds=2.3")
    exact = simulated(*SMALL, *MODES[mode], *equal, f"stop.steps={late.end['steps']}")
    assert late.sha256 == exact.sha256
    assert exact.time_ns <= 2_300_000_000
    assert sum(late.end["dropped_by"]) > 0 == sum(exact.end["dropped_by"])


@pytest.mark.parametrize("every_s", [1.0, 0.5, 0.2])
def test_gossip_in_rounds_makes_every_evaluation(every_s: float) -> None:
    """Rank 0 requested the next evaluation in the round of the last one, and did not contribute its
    own model.

    The run then had one evaluation in 60 s.
    """
    ran = simulated(
        *SMALL, *MODES["early"], "sync.local_steps=1", "stop.seconds=12", f"eval.every_s={every_s}"
    )
    times = evaluations(ran)
    rounds_s = ran.time_ns / 1e9 / ran.end["merges"]
    assert len(times) >= 12 / (every_s + 4 * rounds_s) - 2, (
        "one each time, and at the next round that all know of"
    )
    assert times == sorted(set(times))


def test_groups_make_every_evaluation() -> None:
    """An evaluation that any worker had slept through was never complete: one of some hundred."""
    ran = simulated(*SMALL, *MODES["groups"], "stop.seconds=6", "eval.every_commits=8")
    assert len(evaluations(ran)) >= sum(ran.end["commits"]) // 8 - 4


ROUNDS = {
    "server": ("sync=local_sgd", "sync.local_steps=64"),
    "qsr": ("sync=qsr", "sync.local_steps=16", "sync.alpha=0.4", "sync.h_max=64"),
    "all_reduce": ("topology=all_reduce", "sync=local_sgd", "sync.local_steps=64"),
    "planned": (
        "topology=all_reduce",
        "sync=local_sgd",
        "sync.local_steps=plan",
        "schedule.h_preset=[32]",
        "aggregate=fednova",
    ),
    "rounds": ("topology=gossip", "sync=d_psgd", "sync.local_steps=64"),
    "noloco": ("topology=gossip", "sync=noloco", "sync.local_steps=64", "topology.graph=complete"),
}


@pytest.mark.parametrize("limit", ["stop.epochs=10", "stop.steps=450"])
@pytest.mark.parametrize("mode", ROUNDS)
def test_the_last_round_is_cut_to_what_is_left_of_the_count(mode: str, limit: str) -> None:
    """10 epochs of local SGD by all-reduce with H = 64 became 17.1: a whole round too much."""
    ran = simulated(*SMALL, *ROUNDS[mode], limit, "runtime.gradients=false")
    assert ran.end["reason"] == limit.split("=")[0].removeprefix("stop.")
    wanted = {"stop.epochs=10": 10 * 1437 / 32, "stop.steps=450": 450}[limit]
    assert wanted <= ran.end["steps"] < wanted + ran.plan.num_workers
    assert sum(ran.end["dropped_by"]) == 0
    assert {sum(totals.values()) for totals in ran.ledgers} == {ran.time_ns}


@pytest.mark.parametrize("mode", ["asynchronous", "pairs", "groups"])
def test_elsewhere_the_count_is_passed_by_less_than_a_merge(mode: str) -> None:
    ran = simulated(*SMALL, *MODES[mode], "stop.steps=450", "runtime.gradients=false")
    in_a_merge = {"groups": ran.plan.num_workers}.get(mode, 1) * ran.plan.stages[0].workers[
        0
    ].local_steps
    assert 450 <= ran.end["steps"] < 450 + in_a_merge


@pytest.mark.parametrize(
    ("sync", "cluster", "end"),
    [
        ("ad_psgd", "homogeneous", "stop.steps=41"),
        ("hop", "homogeneous", "stop.steps=41"),
        ("hop", "mixed", "stop.seconds=1.21"),
        ("ad_psgd sync.overlap=false", "mixed", "stop.seconds=1.21"),
    ],
)
def test_what_is_in_the_models_counts_and_came_in_time(sync: str, cluster: str, end: str) -> None:
    """Exchanges at the very time of the end were in other workers' models, and counted as dropped.

    A worker that had asked a peer also merged its work once the answer came, however late.
    """
    where = ("topology=gossip", f"cluster={cluster}", *f"sync={sync}".split())
    ran = simulated("schedule=single", "model.hidden=[8]", "stop.steps=null", *where, end)
    merged = [record for record in ran.of("Round") if not record["dropped"]]
    assert sum(record["steps"] for record in merged) == ran.end["steps"]
    assert max(record["end_ns"] for record in merged) <= ran.time_ns
