"""A full profile of ranks that share a machine: what becomes of it in virtual time."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ashl.advice.flips import with_workers
from ashl.cluster.network import network
from ashl.cluster.spec import Fitted, Quota
from ashl.cluster.speed import LEVELS
from ashl.config.construct import construct
from ashl.errors import UsageError
from ashl.plan.full import Handling, Neighbours, WorkerCosts, quantiles
from ashl.plan.profile import Profile
from ashl.planning.as_fast import as_fast
from ashl.planning.chains import Uncontended
from tests.sim.test_full_profile import cost, of_one, steps
from tests.support import planned, run
from tests.test_profile import profile

TIMED = ["runtime.gradients=false"]


def crowded(
    cores: int = 1, together_s: float = 2.0, hosts: tuple[str, str, str] = ("a", "a", "a"), **own: Any
) -> Profile:
    """Two workers and a server, with steps of 1 s that take so long while both take one; a message takes
    1.25 s alone, of which each end needs a core for half a second."""
    known = of_one(steps([together_s]))
    assert known.full is not None
    given = {"alone_s": 1.0, "alone": steps([1.0]), "used": 1.0, "cores": cores} | own
    costs = WorkerCosts(steps=(steps([together_s]),), push=cost(1.25, 0.0), pull=cost(1.25, 0.0), **given)
    workers = tuple(replace(worker, host=host) for worker, host in zip(profile().workers, hosts[:2], strict=True))
    handling = Handling(worker=cost(0.5, 0.0), server=cost(0.5, 0.0), resumed_s=0.0)
    full = replace(known.full, workers=(costs, costs), handling=handling)
    return replace(known, workers=workers, server_host=hosts[2], full=full)


def cluster(known: Profile) -> Fitted:
    return construct(known.cluster(), "cluster")


def test_too_few_cores_are_shared() -> None:
    found = cluster(crowded())
    assert found.shared is not None
    assert (found.shared.machine, found.shared.cores) == ((0, 0, 0), (1.0,))
    assert (found.compute, found.shared.before) == ((1.0, 1.0), 1.0)
    assert found.latencies == (0.25, 0.25)
    alone = Uncontended(network(found, 40))
    assert alone.latency_ns(0, 2) == alone.transfer_ns(0, 2, 1) == 1.25e9
    assert found.shared.end_s(5, 1) == 0.5


def test_cores_are_counted_by_what_steps_get() -> None:
    for known, cores in [
        (crowded(cores=8, together_s=1.25), (1.6,)),  # whatever the system says
        (crowded(cores=2, together_s=1.0), (2.0,)),  # for two workers and a server
        (crowded(hosts=("a", "b", "b"), together_s=1.0), (1.0, 1.0)),
    ]:
        shared = cluster(known).shared
        assert shared is not None
        assert shared.cores == pytest.approx(cores)


def test_a_quota_comes_anew_in_every_period() -> None:
    """Nine steps in ten that take a second and one of sixteen had 0.6 of a core: uninterrupted most take one."""
    known = crowded(cores=8, alone=steps([1.0] * 9 + [16.0]), together_s=1.0, used=0.6, halt_s=12.5)
    found = cluster(known)
    assert found.shared is not None
    assert (found.shared.cores, found.shared.quotas) == (
        (8.0,),
        (Quota(cores=0.6, period_s=12.5, kept_s=0.001, late_s=0.002),),
    )
    assert found.shared.end_s(0, 1) == 0.5
    assert found.steps is not None
    widths = np.diff([0.0, *LEVELS])
    assert widths @ found.steps[0] == pytest.approx(0.6 * (widths @ quantiles([1.0] * 9 + [16.0])))
    assert found.steps[0][: len(LEVELS) // 2] == (1.0,) * (len(LEVELS) // 2)


def test_what_no_quota_has_held_back_is_a_busy_machine() -> None:
    known = crowded(cores=8, together_s=1.0, used=0.6, halt_s=0.0)
    assert cluster(known).shared is None


def test_the_server_may_have_a_quota_of_its_own() -> None:
    known = crowded(cores=8, together_s=1.0, hosts=("a", "a", "b"))
    assert known.full is not None
    assert known.full.server is not None
    assert cluster(known).shared is None
    server = replace(known.full.server, used=0.25, halt_s=0.1)
    shared = cluster(replace(known, full=replace(known.full, server=server))).shared
    assert shared is not None
    assert shared.quotas == (None, Quota(cores=0.25, period_s=0.1, kept_s=0.001, late_s=0.002))


def test_machines_that_slow_each_other_down_are_one_computers() -> None:
    """Steps take 1.2 times as long while all have their 0.5 of a core: 0.4 of itself for a core in use elsewhere. While
    all exchanged, ends of half a second in 4 s, there was one of a worker and two of the server's, half as long."""
    known = crowded(cores=8, hosts=("a", "b", "c"), together_s=1.2, used=0.5, halt_s=0.1)
    assert known.full is not None
    assert known.full.handling is not None
    handling = replace(known.full.handling, server=cost(0.25, 0.0), exchange_s=4.0)
    shared = cluster(replace(known, full=replace(known.full, handling=handling))).shared
    assert shared is not None
    assert shared.crowded == pytest.approx((0.4, 0.4, 0.4))
    others = (0.125 + 0.125, 0.125 + 0.125, 0.125 + 0.125)
    expected = [end_s / (1 + 0.4 * used) for end_s, used in zip((0.5, 0.5, 0.25), others, strict=True)]
    assert [shared.end_s(rank, 1) for rank in range(3)] == pytest.approx(expected)
    for more in ({"together_s": 1.0}, {"hosts": ("a", "a", "b")}):
        alike = cluster(crowded(**{"cores": 8, "hosts": ("a", "b", "c"), "used": 0.5, "halt_s": 0.1} | more)).shared
        assert alike is not None
        assert not alike.crowded


def test_what_messages_cost_after_a_pause_and_without_a_body() -> None:
    known = crowded()
    assert known.full is not None
    assert known.full.handling is not None
    paused = {"resumed_s": 0.25, "sender_resumed_s": 0.125, "server_resumed_s": 0.5}
    handling = replace(known.full.handling, **paused, empty_s=(0.125, 0.375))
    workers = tuple(replace(own, empty_s=0.75) for own in known.full.workers)
    found = cluster(replace(known, full=replace(known.full, handling=handling, workers=workers)))
    assert found.shared is not None
    assert found.shared.resumed_s == (0.25, 0.25)
    assert [found.shared.end_s(rank, 8) for rank in (0, 1, 2)] == [0.5625, 0.5625, 0.75]
    assert [found.shared.end_s(rank, 0) for rank in (0, 1, 2)] == [0.125, 0.125, 0.375]
    ways = network(found, 40)
    assert ways.transfer_ns(0, 2, 0) == 0.75e9 > ways.transfer_ns(0, 2, 8) - 0.6e9


def test_what_messages_cost_their_ends_is_no_work_of_a_slow_link() -> None:
    """A message is there after half a second and its bytes, of a second that both ends work: the rest comes after."""
    known = crowded()
    assert known.full is not None
    slow = tuple(replace(own, push=cost(0.5, 0.1), pull=cost(0.5, 0.1)) for own in known.full.workers)
    found = cluster(replace(known, full=replace(known.full, workers=slow)))
    assert found.shared is not None
    assert (found.shared.before, found.latencies, found.pull_latencies) == (0.5, (0.0, 0.0), (0.0, 0.0))
    assert network(found, 40).transfer_ns(0, 2, 40) == 4.5e9


def test_as_many_workers_more_have_costs_of_their_own() -> None:
    known = crowded()
    assert known.full is not None
    assert known.full.handling is not None
    handling = replace(known.full.handling, resumed_s=0.25, server_resumed_s=0.5, empty_s=(0.125, 0.375))
    workers = tuple(replace(own, empty_s=0.75) for own in known.full.workers)
    spec = replace(known, full=replace(known.full, handling=handling, workers=workers)).cluster()
    for count in (1, 2, 5):
        found = construct(with_workers(spec, count), "cluster")
        assert (len(found.empty_s), found.shared.resumed_s) == (count, (0.25,) * count)
        assert [found.shared.end_s(rank, 0) for rank in range(count + 1)] == [0.125] * count + [0.375]
        assert {network(found, 40).transfer_ns(rank, count, 0) for rank in range(count)} == {750_000_000}


def test_where_there_are_enough_nothing_changes() -> None:
    """Nor where it is not known who is where. But a quota is kept on a machine of its own, too."""
    assert cluster(crowded(hosts=("a", "b", "c"), together_s=1.0, used=0.4)).shared is not None
    enough = crowded(cores=3, together_s=1.0)
    apart = crowded(hosts=("a", "b", "c"))
    nobody_knows = replace(crowded(), server_host=None)
    for known in (enough, apart, nobody_knows):
        assert cluster(known).shared is None
        assert known.full is not None
        before = replace(known, full=replace(known.full, handling=None))
        assert known.cluster() == before.cluster()


def test_a_profile_of_before_loads_and_is_the_same() -> None:
    """Its calibration is of what it was, though it has fewer figures than one of today."""
    known = of_one(steps([1.0]))
    data = json.loads(known.to_json())
    data.pop("beside")
    for entry in (*data["full"]["workers"], data["full"]):
        for name in ("alone", "used", "halt_s", "empty_s", "cores", "gathering", "handling"):
            entry.pop(name, None)
        for name in ("used", "halt_s"):
            entry.get("server", {}).pop(name, None)
    assert Profile.from_json(json.dumps(data)).digest == known.digest == "edf8b26846b245cd"
    assert Profile.from_json(crowded().to_json()) == crowded()


def seconds(known: Profile, **costs: float) -> float:
    """Of 80 steps of two workers, each at its own pace."""
    ran = planned("sync=asp", "schedule=single", "cluster=homogeneous", "cluster.compute=[1,1]", *TIMED)
    own = {**known.cluster(), **costs}
    return run(replace(ran, cluster=own, limits=replace(ran.limits, steps=80))).time_ns / 1e9


def test_a_run_takes_as_long_as_its_work() -> None:
    """A step, a push, an eighth of a second to apply it, and a pull are 3.125 s of a core, but for the last pulls; on
    two cores a cycle of both workers takes 3.625 s."""
    assert 80 * 3.125 - 2 <= seconds(crowded()) <= 80 * 3.125 + 0.5
    assert 40 * 3.625 - 2 <= seconds(crowded(2, 1.0)) <= 40 * 3.625 + 1


def test_a_server_does_one_thing_at_a_time() -> None:
    """Its two ends of messages and 2 s to apply a push are 3 s, where all of it is 2.5 s on two cores."""
    assert 80 * 3 <= seconds(crowded(2, 1.0), server_step_s=2.0) <= 80 * 3 + 5


def test_a_message_whose_header_is_there_is_being_pulled() -> None:
    """Two pulls of 4 s each in turn: the second one's time at the server's port is no waiting."""
    ran = planned("sync=bsp", "schedule=single", "cluster=homogeneous", "cluster.compute=[1,1]", *TIMED)
    own = {**crowded().cluster(), "server_out": {"latency_s": 4.0, "s_per_byte": 0.0}}
    found = run(replace(ran, cluster=own, limits=replace(ran.limits, steps=80)))
    pulled = [ledger["pull"] / 1e9 for ledger in found.ledgers[:2]]
    assert min(pulled) > 39 * 4 - 1
    assert max(pulled) > 39 * 8 - 1


def test_rounds_take_as_long_as_those_that_were_seen() -> None:
    """Whatever ends and pauses used of a core: 2.5 s for an exchange, 4 s with a step and its push applied."""
    known = crowded()
    assert known.full is not None
    assert known.full.handling is not None
    handling = replace(known.full.handling, resumed_s=0.3, server_resumed_s=0.1, exchange_s=2.5, round_s=4.0)
    seen = as_fast(replace(known, full=replace(known.full, handling=handling)))
    assert seen.full is not None
    assert seen.full.handling is not None
    paused_s = 4.0 - 2.5 - 1.0 - 0.125 * 1.25  # applying is as slowed
    assert seen.full.handling.slowed == pytest.approx(1.25, rel=0.01)
    assert seen.full.handling.paused == pytest.approx(paused_s / 0.4, rel=0.1), "which is a tenth of a round"
    shared = cluster(seen).shared
    assert shared is not None
    assert shared.resumed_s == pytest.approx((0.75 * paused_s,) * 2, rel=0.1)
    assert (shared.end_s(0, 1), shared.end_s(2, 1)) == pytest.approx((0.625, 0.625 + 0.25 * paused_s / 2), rel=0.02)
    assert seconds(seen) == pytest.approx(80 * 4, rel=0.02)


def test_what_takes_as_long_whatever_messages_cost_scales_nothing() -> None:
    """Messages of 100 s on their way, of which their ends are a hundredth; and where nobody has measured it."""
    known = crowded()
    assert known.full is not None
    assert known.full.handling is not None
    assert as_fast(known) is known
    workers = tuple(replace(own, push=cost(100.0, 0.0), pull=cost(100.0, 0.0)) for own in known.full.workers)
    near = Neighbours(count=1, end=cost(0.5, 0.0), round=cost(150.0, 0.0))
    handling = replace(known.full.handling, resumed_s=0.3, exchange_s=150.0, round_s=150.0)
    found = as_fast(replace(known, full=replace(known.full, workers=workers, handling=handling, neighbours=near))).full
    assert found is not None
    assert found.handling is not None
    assert found.neighbours is not None
    assert (found.handling.slowed, found.handling.paused, found.neighbours.slowed) == (1.0, 1.0, 1.0)


GOSSIP = ["topology=gossip", "sync=d_psgd"]


def by_gossip(known: Profile, **costs: Any) -> Any:
    """80 steps of two workers who exchange models in every round."""
    ran = planned(*GOSSIP, "schedule=single", "cluster=homogeneous", "cluster.compute=[1,1]", *TIMED)
    return run(replace(ran, cluster={**known.cluster(), **costs}, limits=replace(ran.limits, steps=80)))


def test_messages_between_workers_cost_what_they_did_there() -> None:
    """On one core: two steps and four ends of messages are 4 s with ends as they are to the server; as timed between
    neighbours the round is 6 s, for which each end takes 1 s."""
    known = crowded()
    assert known.full is not None
    assert known.full.handling is not None
    assert by_gossip(known).time_ns / 1e9 == pytest.approx(40 * 4, abs=2)
    near = Neighbours(count=1, end=cost(0.75, 0.0), round=cost(6.0, 0.0))
    handling = replace(known.full.handling, exchange_s=2.0, round_s=3.125)
    seen = as_fast(replace(known, full=replace(known.full, neighbours=near, handling=handling)))
    shared = cluster(seen).shared
    assert shared is not None
    assert (shared.end_s(0, 1, between=True), shared.end_s(0, 1)) == pytest.approx((1.0, 0.5), rel=0.05)
    assert by_gossip(seen).time_ns / 1e9 == pytest.approx(40 * 6, rel=0.02)


def test_what_goes_between_workers_holds_up_what_comes() -> None:
    """Bytes take 4 s each way at once, beside a step of 1 s, and half as long again where they cross."""
    known = crowded(8, 1.0)
    bytes_s = 38_440 / 4
    own = {"up_bytes_s": [bytes_s] * 2, "down_bytes_s": [bytes_s] * 2, "latencies": [0.0] * 2}
    free = {**own, "pull_latencies": [0.0] * 2, "shared": None}
    plenty = {
        **free,
        "shared": {
            **crowded().cluster()["shared"],
            "cores": [8.0],
            "ends": [{"latency_s": 0.0, "s_per_byte": 0.0}] * 3,
        },
    }
    for costs in (free, plenty):
        for crossed, round_s in ((0.0, 4.0), (0.5, 6.0)):
            found = by_gossip(known, **costs, crossed=crossed)
            assert found.time_ns / 1e9 == pytest.approx(40 * round_s, rel=0.01)


def test_who_comes_to_a_sum_first_waits_as_long_as_it_did() -> None:
    known = crowded(8, 1.0)
    shared = {**crowded().cluster()["shared"], "cores": [8.0], "busy": [[2, 0.0]]}
    ran = planned("topology=all_reduce", "sync=bsp", "schedule=single", "cluster.compute=[1,1]", *TIMED)
    for waited, share in (([], 0.0), ([[2, 0.25]], 0.25)):
        sums = [{"group": 2, "latency_s": 4.0, "s_per_byte": 0.0}]
        own = {**known.cluster(), "group_sums": sums, "shared": {**shared, "waited": waited}}
        found = run(replace(ran, cluster=own, limits=replace(ran.limits, steps=80)))
        assert found.time_ns / 1e9 == pytest.approx(40 * 5, rel=0.01), "which is no other time"
        assert [own["wait"] / 1e9 for own in found.ledgers[:2]] == pytest.approx([40 * 4 * share] * 2, rel=0.01)


def test_checkpoints_are_refused(workplace) -> None:
    known = replace(crowded(), model="mlp", num_params=9610, dense_bytes=38_440)
    (workplace / "p.json").write_text(known.to_json())
    with pytest.raises(UsageError, match="too few cores for all ranks, and no checkpoint holds what shares them"):
        planned("cluster=profile", "profile=p.json", "run.checkpoint_s=1")
    assert known.full is not None
    assert known.full.server is not None
    server = replace(known.full.server, into=cost(0.0, 1e-3), out=cost(0.0, 1e-3), crossed_s_per_byte=5e-4)
    (workplace / "p.json").write_text(replace(known, full=replace(known.full, server=server, handling=None)).to_json())
    with pytest.raises(UsageError, match="leaves it slow each other down, and no checkpoint holds how far both are"):
        planned("cluster=profile", "profile=p.json", "run.checkpoint_s=1")
    planned(
        "cluster=profile", "profile=p.json", "run.checkpoint_s=1", "topology=all_reduce", "sync=bsp", "schedule=single"
    )


def test_failures_go_with_cores_for_all() -> None:
    known = crowded()
    assert known.full is not None
    alone = replace(known, full=replace(known.full, handling=None))
    assert known.cluster(shared=False) == alone.cluster() != known.cluster()
