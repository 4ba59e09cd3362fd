"""Workers that fail and rejoin, in virtual time: what a parameter server makes of it, held against
a reference without a server, and to the nanosecond.
"""

from dataclasses import replace
from typing import ClassVar

import pytest

from ashl.cluster import spec
from ashl.cluster.network import make_network
from ashl.cluster.spec import Event
from ashl.cluster.speed import Speed
from ashl.errors import AshlError, UsageError
from ashl.option import option
from ashl.plan.plan import Plan
from ashl.planning.compatibility import check_faults
from ashl.planning.instantiate import assemble_job, parts_of
from ashl.runtime.churn import Churn
from ashl.runtime.effects import PEER_FAILED, PeerFailedError
from ashl.runtime.rank_context import RankContext
from ashl.runtime.sim import Sim
from ashl.stage.members import members_of, merge_weights
from ashl.topology.all_reduce import AllReduce
from ashl.topology.parameter_server import ServerRule
from tests.laws.machines import cluster
from tests.support import planned, run
from tests.swarm.drawn import Seen

DETECT_S = 0.02  # of the cluster below
RUN = (
    "cluster=homogeneous",
    "cluster.compute=[1,2,4]",
    "dataset.batch_size=16",
    "eval.every_commits=1",
)


def with_events(plan: Plan, *events: dict, **cluster: object) -> Plan:
    return replace(plan, cluster=plan.cluster | {"events": list(events), **cluster})


def lost(worker: int, time_s: float) -> dict:
    return {"time_s": time_s, "worker": worker, "fail": True}


def back(worker: int, time_s: float) -> dict:
    return {"time_s": time_s, "worker": worker, "rejoin": True}


def test_a_loss_while_all_wait_for_it_makes_the_round_whole_at_once() -> None:
    """The slowest needs 0.08 s; the others wait. It fails at 0.05 s, and 0.02 s later the round is
    merged.
    """
    ran = run(with_events(planned(*RUN, "sync=bsp", "stop.steps=20"), lost(2, 0.05)))
    first = ran.snapshots[0][0]
    assert first["time_ns"] == round((0.05 + DETECT_S) * 1e9)
    assert first["commits"] == [1, 1, 0]


def test_pushes_of_a_failed_worker_for_the_round_are_dropped_and_counted() -> None:
    """The quickest pushes at 0.025 s and fails while it waits for the others."""
    ran = run(with_events(planned(*RUN, "sync=bsp", "stop.steps=20"), lost(0, 0.03)))
    assert ran.end["commits"][0] == 0
    assert ran.end["dropped_by"] == [1, 0, 0]
    assert ran.snapshots[0][0]["commits"] == [0, 1, 1]


def test_one_at_a_time_the_weights_are_those_of_the_others() -> None:
    ran = run(
        with_events(planned(*RUN, "sync=asp", "stop.steps=60", "aggregate=uniform"), lost(2, 0.3))
    )
    stage = assemble_job(ran.plan, "cpu").stages[0]
    pushes = [type("Push", (), {"worker": rank}) for rank in (0, 1)]
    for members, weight in (((0, 1), 0.5), (None, 1 / 3)):
        work = members_of(stage, members).planned
        assert merge_weights(stage, work, pushes) == [weight, weight]
    assert ran.end["commits"][2] == 3  # cycles of 0.09 s


def test_a_lead_is_counted_from_the_slowest_who_is_left() -> None:
    """Under SSP nobody is more than s commits ahead of the slowest; once that is gone, nobody waits
    for it.
    """
    mode = ("sync=ssp", "sync.staleness=1", "runtime.gradients=false", "stop.seconds=3")
    ran = run(with_events(planned(*RUN, *mode), lost(2, 0.5)))
    assert ran.end["commits"][2] <= 6
    assert ran.end["commits"][1] == pytest.approx(
        2.5 / 0.05, abs=8
    )  # its own cycles of 0.05 s from there on
    assert ran.end["max_lead"] <= 1


def test_a_rejoining_worker_has_the_model_and_its_part_of_the_rounds() -> None:
    ran = run(with_events(planned(*RUN, "sync=bsp", "stop.steps=60"), lost(1, 0.2), back(1, 0.6)))
    down = ran.ledgers[1]["down"]
    assert down == 400_000_000
    rounds = [r for r in ran.of("Round") if r["rank"] == 1]
    again = next(r for r in rounds if r["end_ns"] > 600_000_000)
    assert ["down", 200_000_000, 600_000_000] in [list(span) for span in again["spans_ns"]]
    assert ran.end["commits"][1] < ran.end["commits"][0] == ran.end["commits"][2]
    assert all(r["staleness"] == 0 for r in rounds), "it computes on the model of its round"


def test_who_was_away_counts_as_the_slowest() -> None:
    """No worker waits for its lead: SSP's bound holds, and no worker is blocked until it has caught
    up.
    """
    mode = ("sync=ssp", "sync.staleness=2", "runtime.gradients=false", "stop.seconds=4")
    ran = run(with_events(planned(*RUN, *mode), lost(0, 0.5), back(0, 2.5)))
    assert ran.end["max_lead"] <= 2
    gaps = [r["end_ns"] - r["start_ns"] for r in ran.of("Round") if r["rank"] == 1]
    assert max(gaps) < 500_000_000


ONE = (
    "cluster=homogeneous",
    "cluster.compute=[1]",
    "sync=asp",
    "stop.steps=9",
    "runtime.gradients=false",
)


def test_transfers_wait_until_the_link_is_back() -> None:
    """The second push is in flight from 0.05 s on for 0.005 s; from 0.052 s to 0.152 s nothing
    moves.
    """
    plan = planned(*ONE)
    ran = run(with_events(plan, {"time_s": 0.052, "worker": 0, "link_down": 0.1}))
    assert ran.time_ns == run(plan).time_ns + 100_000_000
    assert ran.ledgers[0]["push"] == run(plan).ledgers[0]["push"] + 100_000_000


def test_failures_at_random_are_each_workers_own() -> None:
    plan = planned(*RUN, "sync=asp", "runtime.gradients=false", "stop.seconds=12")
    churn = {"churn": {"mtbf_s": 1.0, "mttr_s": 0.2}}
    ran = run(with_events(plan, **churn))
    other = run(with_events(plan, {"time_s": 1.0, "worker": 0, "link_down": 0.5}, **churn))
    found = [
        [(r["rank"], r["time_ns"]) for r in of.of("WorkerFailed") if r["rank"] == 1]
        for of in (ran, other)
    ]
    assert len(found[0]) > 3
    assert found[0] == found[1]
    assert all(sum(ledger.values()) == ran.time_ns for ledger in ran.ledgers)
    away = sum(ledger["down"] for ledger in ran.ledgers) / ran.time_ns / 3
    assert 0.05 < away < 0.4  # 1 / 6 on average
    assert run(with_events(plan, **churn)).records == ran.records


TOPOLOGIES = {
    "server": ("sync=asp",),
    "all_reduce": ("topology=all_reduce", "sync=local_sgd"),
    "groups": (
        "topology=partial_all_reduce",
        "sync=ripples_first_come",
        "sync.group_size=2",
        "sync.local_steps=2",
    ),
    "gossip": ("topology=gossip", "sync=d_psgd", "sync.local_steps=2"),
    "tree of servers": ("topology=halos", "topology.regions=[0,0,1]", "sync=asp"),
}


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_failures_at_random_never_end_a_run(topology: str) -> None:
    mode = (*TOPOLOGIES[topology], "runtime.gradients=false", "runtime.min_workers=2")
    plan = with_events(planned(*RUN, *mode, "stop.seconds=5"), churn={"mtbf_s": 0.3, "mttr_s": 0.5})
    ran = run(plan)
    assert ran.end["reason"] == "seconds"
    assert len(ran.of("WorkerFailed")) > 5
    assert min(ran.end["dropped_by"]) >= 0
    there = 3
    for record in ran.records:
        there += {"WorkerFailed": -1, "WorkerRejoined": 1}.get(record["kind"], 0)
        assert there >= 2
    assert run(plan).records == ran.records


def test_a_run_ends_if_workers_fail_too_often_for_any_merge() -> None:
    """A step takes 0.02 s or more, and a worker fails after 0.001 s. A time budget ends it, too."""
    churn = {"churn": {"mtbf_s": 0.001, "mttr_s": 0.005}}
    line = (*RUN, "sync=asp", "runtime.gradients=false")
    with pytest.raises(AshlError, match="no merge ended during the last 301 failures"):
        run(with_events(planned(*line, "stop.steps=20"), **churn))
    ran = run(with_events(planned(*line, "stop.seconds=1"), **churn))
    assert ran.end["reason"] == "seconds"


ALL_FAIL = (lost(0, 0.1), lost(1, 0.2), lost(2, 0.3))
FEWER = r"2 of 3 workers are running, fewer than runtime\.min_workers=3"


@pytest.mark.parametrize(
    ("topology", "events", "least", "said"),
    [
        ("server", ALL_FAIL, 1, r"worker 2 failed by 0\.32 s and 0 of 3 workers are running"),
        ("all_reduce", ALL_FAIL, 1, r"worker 2 failed at 0\.3 s and 0 of 3 workers remain that"),
        *((topology, (lost(0, 0.1),), 3, FEWER) for topology in TOPOLOGIES),
        (
            "server",
            ({"time_s": 0.1, "server_fail": True},),
            1,
            r"the server failed at 0\.1 s, as cluster\.events says",
        ),
    ],
)
def test_the_run_ends_where_too_few_are_left(
    topology: str, events: tuple[dict, ...], least: int, said: str
) -> None:
    mode = (*TOPOLOGIES[topology], "runtime.gradients=false", f"runtime.min_workers={least}")
    with pytest.raises(AshlError, match=said):
        run(with_events(planned(*RUN, *mode, "stop.seconds=1"), *events))


def test_a_loss_while_profiling_ends_the_run_and_one_after_it_does_not() -> None:
    plan = planned(*RUN, "schedule=ashl", "stop.steps=120", "eval.every_commits=5")
    with pytest.raises(PeerFailedError, match="rank 1 has failed"):
        run(with_events(plan, lost(1, 0.5)))
    drift = {"time_s": 0.0, "worker": 0, "compute": 6.0}
    ran = run(with_events(plan, drift, lost(1, 2.4), back(1, 2.9)))
    assert ran.of("StageEnd")[0]["end_ns"] < 2_400_000_000
    assert ran.end["reason"] == "steps"
    (made,) = ran.of("PlanMade")
    planned_steps = made["stages"][0][1][0]
    assert planned_steps != plan.stages[1].workers[1].local_steps
    again = [
        r["steps"]
        for r in ran.of("Round")
        if r["rank"] == 1 and r["end_ns"] > 2_900_000_000 and r["stage"] == 1
    ]
    assert set(again) == {planned_steps}, (
        "who comes back does what was planned while the run went on"
    )


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([back(0, 1.0)], "has rejoin, and worker 0 is running at that time"),
        ([lost(0, 1.0), lost(0, 2.0)], "has fail, and worker 0 has failed at that time"),
        ([lost(7, 1.0)], "there are only workers 0 to 2"),
        ([{"time_s": 1.0, "fail": True}], "names no worker"),
        (
            [{"time_s": 1.0, "worker": 1, "server_fail": True}],
            "has server_fail together with another change",
        ),
        ([{"time_s": 1.0, "worker": 1, "link_down": 0.0}], "changes nothing"),
        (
            [{"time_s": 1.0, "worker": 1, "link_down": 1.0, "fail": True}],
            "has fail and link_down at once",
        ),
    ],
)
def test_events_that_cannot_be_are_refused(events: list[dict], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        cluster(3, events=tuple(Event(**event) for event in events))


@option
class Rigid(ServerRule):
    """A sync mode of a user that needs all workers."""

    supports: ClassVar[frozenset[str]] = frozenset()


def test_unsupported_resumes_name_an_alternative() -> None:
    plan = planned(*RUN, "sync=bsp", "runtime.gradients=false")
    parts, churn = parts_of(plan), spec.Churn(mtbf_s=5.0, mttr_s=1.0)
    (own,), random = parts.stages, replace(parts.cluster, churn=churn)

    def refused(said: str, *, befallen: object = random, **stage: object) -> None:
        changed = replace(parts, cluster=befallen, stages=(replace(own, **stage),))
        with pytest.raises(UsageError, match=said):
            check_faults(changed, plan.stages)

    refused("cannot continue without a failed worker; remove", sync=Rigid())
    server = Event(time_s=1.0, server_fail=True)
    refused(
        "no server that could fail",
        befallen=replace(parts.cluster, events=(server,)),
        topology=AllReduce(),
    )
    with pytest.raises(UsageError, match="min_workers=4: the run has 3 workers; take at most 3"):
        check_faults(replace(parts, runtime=replace(parts.runtime, min_workers=4)), plan.stages)
    assert "failure_detection_s" in replace(random, failure_detection_s=None).missing_costs(), (
        "a missing cost is never zero"
    )


def test_a_message_from_before_the_notice_is_not_for_the_next_incarnation() -> None:
    """The server sends it after the rejoin, and reads only then that the worker has failed."""
    fails, rejoins = (
        Event(time_s=1.0, worker=0, fail=True),
        Event(time_s=2.0, worker=0, rejoin=True),
    )
    pair, tags, received = cluster(1, events=(fails, rejoins)), (("x", 0, 0), ("y", 0, 0)), []

    async def play(ctx: RankContext, joins: bool = False) -> None:
        if ctx.rank == 1:
            await ctx.sleep(3.0)
            await ctx.send(0, tags[0])
            await ctx.recv(PEER_FAILED)
            await ctx.send(0, tags[1])
        else:
            message = await ctx.recv(*tags)
            received.append((message.tag[0], joins))

    sim = Sim(2, Speed(pair, 8, 0), make_network(pair, 4), Seen())
    Churn(sim, pair, 0, 0, lambda rank: (1,), play)
    sim.run(play, lambda: None)
    assert received == [("y", True)]
