"""`ashl profile --full`: what it finds in virtual time is what the cluster declares, and virtual time runs by it."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ashl.calibration.spans import scaled
from ashl.cli.app import main
from ashl.cluster.network import network
from ashl.cluster.speed import LEVELS
from ashl.config.construct import construct
from ashl.plan.full import Coding, Cost, Full, Neighbours, ServerCosts, StepTimes, Sum, WorkerCosts, crossed, quantiles
from ashl.plan.profile import Profile
from ashl.sync.timing.fits import cost_of, cost_with_least, crossing, line_through
from ashl.sync.timing.group_sums import IN_A_ROW, beyond_steps
from ashl.sync.timing.quotas import halts, held_back
from tests.support import run, simulated
from tests.test_profile import profile

TIMED = ["runtime.gradients=false", "schedule=single", "stop.steps=150"]
LINKS = ["cluster.exchange_s=null", "cluster.bandwidth_mbit_s=20", "cluster.latency_s=0.002"]
COSTS = ["cluster.compress_s=0.004", "cluster.server_step_s=0.001", "cluster.server_bandwidth_mbit_s=30"]
PROFILED = ["cluster=profile", "profile=profile.json"]
DECLARED = ["cluster=homogeneous", "cluster.compute=[1,3]", *LINKS, *COSTS]


def measured(*overrides: str) -> Profile:
    """The full profile that a run in virtual time makes of a declared cluster."""
    full = ["runtime.gradients=false", "schedule=profile_only", "schedule.full=true", "compression=topk"]
    found = Profile.from_json(simulated(*full, *overrides).of("profile")[0]["profile"])
    Path("profile.json").write_text(found.to_json())
    return found


def cost(latency_s: float, s_per_byte: float) -> Cost:
    return Cost(latency_s=latency_s, s_per_byte=s_per_byte, latency_noise_s=0.0, s_per_byte_noise=0.0)


def steps(times: list[float], in_order: bool = False) -> StepTimes:
    table = tuple(times) if in_order else quantiles(times)
    middle, mean = float(np.median(times)), float(np.mean(times))
    given = {"batch": 32, "count": len(times), "noise_s": 0.0, "drift": 0.0, "in_order": in_order}
    return StepTimes(median_s=middle, mean_s=mean, times_s=table, **given)


def of_one(times: StepTimes, **costs: Any) -> Profile:
    """Of one worker and a server, by hand: 1,000 bytes/s up, 4,000 down, of a model of 40,000 bytes."""
    own = WorkerCosts(steps=(times,), alone_s=None, push=cost(0.5, 1e-3), pull=cost(0.25, 2.5e-4))
    server = ServerCosts(apply_s=0.125, apply_noise_s=0.0, into=cost(0.0, 0.0), out=cost(0.0, 0.0))
    known = {"workers": (own,), "server": server, "sums": (), "codings": (), "made": "", "versions": {}} | costs
    one = profile()
    return replace(one, workers=one.workers[:1], full=Full(**known))


def test_what_is_measured_is_what_is_declared(workplace) -> None:
    """20 and 30 Mbit/s: two pushes at once share the server's port."""
    found = measured(*DECLARED)
    assert found.full is not None
    assert found.full.server is not None
    for worker, step_s in zip(found.full.workers, (0.02, 0.06), strict=True):
        assert [own.batch for own in worker.steps] == [32, 16, 8]
        assert [own.median_s for own in worker.steps] == pytest.approx([step_s, step_s / 2, step_s / 4])
        assert [asdict(way)["latency_s"] for way in (worker.push, worker.pull)] == pytest.approx([0.002] * 2)
        assert [1 / way.s_per_byte for way in (worker.push, worker.pull)] == pytest.approx([2.5e6] * 2)
    assert found.full.server.apply_s == pytest.approx(0.001)
    assert 1 / found.full.server.into.s_per_byte == pytest.approx(3.75e6)
    assert [own.group for own in found.full.sums] == [2]
    assert found.full.neighbours is not None
    assert found.full.neighbours.count == 1
    assert found.full.neighbours.round.seconds(found.dense_bytes) == pytest.approx(0.06, rel=0.01), (
        "who is slow waits for nobody"
    )
    (coding,) = found.full.codings
    assert [own.seconds(found.dense_bytes) for own in coding.encode] == pytest.approx([0.004] * 2)


@pytest.mark.parametrize(
    ("exchange_s", "latency_s", "crossed"),
    [
        (9.0, 0.5, 4.5e-3),  # 4.5 s are asked for by either way
        (4.9, 0.5, None),  # hardly more
        (9.0, 4.5, None),  # processors are slow: it is not bytes
        (30.0, 0.5, 25.5e-3),
    ],
)
def test_bytes_that_come_and_go_at_once_cost_more(exchange_s: float, latency_s: float, crossed: float | None) -> None:
    port = {"in": cost(latency_s, 4e-3), "out": cost(latency_s, 3e-3)}
    links = {"in": [cost(1.0, 1e-3)] * 3, "out": [cost(2.0, 2e-3)] * 3}
    assert crossing(port, links, exchange_s, nbytes=1_000) == (None if crossed is None else pytest.approx(crossed))
    slow = {way: [cost(4.0, 4e-3)] * 3 for way in links}  # 16 s for both, for 3 of them at once
    assert crossing(port, slow, 16 / 3, 1_000) is None


def test_bytes_hold_up_what_goes_the_other_way_at_the_server() -> None:
    """In turn, whatever comes first: an exchange both ways takes longer by what each way's bytes hold the other up."""
    known = of_one(steps([1.0]))
    assert known.full is not None
    assert known.full.server is not None
    slow = replace(known.full.server, into=cost(0.0, 1e-3), out=cost(0.0, 1e-3), crossed_s_per_byte=5e-4)
    found = construct(replace(known, full=replace(known.full, server=slow)).cluster(), "cluster")
    ports = network(found, 40)
    server = len(found.compute)
    ports.depart(0, server, 1_000, 0)
    assert ports.arrive(0, server, 1_000, 0, 0) == 1e9
    assert ports.depart(server, 0, 100, 0)[0] == 0.5e9, "the push holds up the pull"
    ports.depart(0, server, 1_000, 0)
    assert ports.arrive(0, server, 1_000, 10**9, 10**9) == 2.05e9, "and the pull the next push"


@pytest.mark.parametrize(
    ("round_s", "share"),
    [(8.0, 0.0), (8.5, 0.0), (12.0, 0.5), (16.0, 1.0), (17.0, 0.0)],  # 8 s are asked for
)
def test_bytes_between_workers_hold_each_other_up(round_s: float, share: float) -> None:
    """Where they are most of a round, and it takes longer than they ask for."""
    near = Neighbours(count=2, end=cost(0.0, 0.0), round=cost(round_s, 0.0))
    full = of_one(steps([1.0]), neighbours=near).full
    assert full is not None
    assert crossed(full, 4_000) == pytest.approx(share)


def test_members_of_a_sum_come_to_it_apart() -> None:
    """Of one round in a row: steps of 1 and 2 s, then a second for who comes last, and one more for the others."""
    alike = [(0.0, 1.0, 5.0), (0.0, 2.0, 5.0)]  # begin, its sum, its end
    assert [IN_A_ROW * each for each in beyond_steps(alike)] == pytest.approx([3.0, 0.0])
    late = [(0.0, 1.0, 5.0), (1.0, 3.0, 5.0)]  # it has begun late, and of 2 s that the other waits one is no step's
    assert [IN_A_ROW * each for each in beyond_steps(late)] == pytest.approx([2.5, 0.5])


def test_virtual_time_on_it_is_that_of_the_declared_cluster(workplace) -> None:
    measured(*DECLARED)
    for rules in (
        "sync=asp",
        "sync=bsp compression=topk",
        "sync=bsp topology=all_reduce",
        "sync=d_psgd topology=gossip",
    ):
        own, ran = (simulated(*TIMED, *rules.split(), *of) for of in (DECLARED, PROFILED))
        assert ran.plan.cluster["_target_"] == "ashl.cluster.spec.Fitted"
        assert ran.time_ns == pytest.approx(own.time_ns, rel=2e-3)
        assert ran.ledgers[0] == pytest.approx(own.ledgers[0], rel=0.02, abs=2e6)
        rates = [each.plan.stages[0].predicted_steps_per_s for each in (own, ran)]
        assert rates[1] == pytest.approx(rates[0], rel=2e-3)


def test_steps_are_drawn_from_what_was_measured(workplace) -> None:
    """A pure function of the seed, with the spread of the cluster; nothing else changes: without gradients the run is
    as long as its steps."""
    jitter = ["cluster=homogeneous", "cluster.compute=[1]", "cluster.exchange_s=0", "cluster.jitter=0.5"]
    full = measured(*jitter).full
    assert full is not None
    assert full.workers[0].steps[0].mean_s == pytest.approx(0.02, rel=0.1)
    first, again, other = (simulated(*TIMED, *PROFILED, "sync=asp", f"seed={seed}") for seed in (0, 0, 1))
    assert (first.time_ns, first.records) == (again.time_ns, again.records)
    assert first.time_ns != other.time_ns
    assert first.time_ns / 150e9 == pytest.approx(full.workers[0].steps[0].mean_s, rel=0.15)
    spans = [end - start for r in first.of("round") for kind, start, end in r["spans_ns"] if kind == "compute"]
    for share in (0.1, 0.5, 0.9):
        assert np.quantile(spans, share) / 1e9 == pytest.approx(full.workers[0].steps[0].at(share), rel=0.3)


def test_each_way_has_its_own_costs_and_steps_may_come_in_order(workplace) -> None:
    """A cycle is a step, a push, what it takes to apply, and a pull; steps of 1 and 2 s take turns."""
    spec = of_one(steps([1.0, 2.0, 1.0, 2.0], in_order=True)).cluster()
    ran = simulated(*TIMED, "sync=asp", "cluster=homogeneous", "cluster.compute=[1]")
    push_s, pull_s = 0.5 + 38_440 * 1e-3, 0.25 + 38_440 * 2.5e-4
    plan = replace(ran.plan, cluster=spec, limits=replace(ran.plan.limits, steps=4))
    assert run(plan).time_ns / 1e9 == pytest.approx(6 + 4 * (push_s + 0.125) + 3 * pull_s)


def test_an_encoding_is_that_of_the_codec(workplace) -> None:
    coding = Coding(codec="ashl.compression.topk.TopK", encode=(cost(1.0, 1e-4),), decode=cost(0.5, 0.0))
    known = of_one(steps([1.0]), codings=(coding,), sums=(Sum(group=1, cost=cost(1.0, 0.0)),))
    cluster = construct(known.cluster(coding.codec), "cluster")
    assert cluster.compress_of(0) == pytest.approx(1.0 + 40_000 * 1e-4)
    assert cluster.server_step_s == pytest.approx(0.125 + 0.5)
    assert cluster.decode_of(0) == 0.5
    coding = replace(coding, decode_all=cost(0.25, 0.0))
    all_at_once = construct(of_one(steps([1.0]), codings=(coding,)).cluster(coding.codec), "cluster")
    assert (all_at_once.decode_of(0), all_at_once.server_step_s) == (0.25, cluster.server_step_s)
    other = construct(known.cluster("another"), "cluster")
    assert (other.compress_of(0), other.decode_of(0)) == (known.workers[0].compress_s, 0.0)


def test_who_gathers_takes_all_bodies_apart(workplace) -> None:
    """In each round each of two workers decodes two bodies, as long as the server does."""
    rules = ["sync=bsp", "topology=all_reduce", "compression=topk", "cluster=homogeneous", "cluster.compute=[1,1]"]
    plan = simulated(*TIMED, *rules, *LINKS).plan
    spec = of_one(steps([1.0])).cluster()
    both = {key: value * 2 if isinstance(value, list) and len(value) == 1 else value for key, value in spec.items()}
    ended = [run(replace(plan, cluster=both | {"decode_s": time_s})) for time_s in (0.0, 0.25)]
    rounds = len(ended[0].of("round")) // 2
    assert ended[1].time_ns - ended[0].time_ns == rounds * 2 * 0.25e9
    assert ended[1].ledgers[0]["compress"] - ended[0].ledgers[0]["compress"] == rounds * 2 * 0.25e9


def test_only_a_quota_holds_back() -> None:
    """What the system never counted is a busy machine, on which steps and encodings take as long as they take."""
    node: Any = SimpleNamespace(throttled=3)
    assert [held_back(node, before) for before in (3, 2, None)] == [False, True, True]


def test_how_often_a_quota_interrupts() -> None:
    """Also where each piece of work is interrupted; what differs by itself is not."""
    assert halts([1.0] * 9 + [16.0], [1.0] * 10) == 25.0
    assert halts([4.0] * 10, [1.0] * 10) == 4.0
    assert halts([1.0, 3.0] * 4 + [8.0], [1.0, 3.0] * 4 + [2.0]) == 24.0
    assert halts([2.0] * 5, [2.0] * 5) == 0.0


def test_lines_and_their_intervals() -> None:
    assert line_through([(0, 2.0), (100, 3.0), (200, 4.0)]) == pytest.approx((2.0, 0.01))
    assert line_through([(100, 0.5), (200, 2.0)])[0] == 0.0  # never less than nothing
    noisy = cost_of({0: [0.1] * 3, 100: [2.0, 2.15, 1.95], 200: [3.0, 3.25, 2.95]})
    assert noisy.latency_s == pytest.approx(1.0)
    assert 0.02 < noisy.latency_noise_s <= 0.1
    assert cost_of({}) == cost(0.0, 0.0)


def test_small_sums_may_all_cost_the_least() -> None:
    found = cost_with_least({100: [5.0] * 3, 200: [5.0] * 3, 400: [8.0] * 3, 800: [16.0] * 3})
    assert [found.seconds(nbytes) for nbytes in (0, 200, 400, 600)] == pytest.approx([5.0, 5.0, 8.0, 12.0])
    straight: dict[int, list[float]] = {100: [2.0, 2.1, 1.9], 200: [3.0, 3.1, 3.2], 400: [5.0, 5.2, 5.1]}
    assert cost_with_least(straight) == cost_of(straight)
    assert cost_with_least({100: [2.0]}) == cost_of({100: [2.0]})
    known = of_one(steps([1.0]), sums=(Sum(group=1, cost=found),)).cluster()
    assert known["group_sums"] == [{"group": 1, "latency_s": 0.0, "s_per_byte": 0.02, "least_s": 5.0}]
    longer = scaled(found, 100, 10.0)
    assert (longer.seconds(100), longer.seconds(800)) == pytest.approx((10.0, 32.0)), "as a replay has it"


def test_what_is_read(workplace) -> None:
    """It survives its file; one of before loads; what cannot be is refused in one sentence."""
    known = of_one(steps([1.0, 2.0]))
    assert Profile.from_json(known.to_json()) == known
    before = {k: v for k, v in json.loads(profile().to_json()).items() if k not in ("full", "calibration")}
    assert Profile.from_json(json.dumps(before | {"schema": 3})) == profile()
    data = json.loads(known.to_json())
    for path, value, words in [
        (("workers", 0, "steps", 0, "times_s"), [1.0], f"1 quantiles in times_s where {len(LEVELS)} are expected"),
        (("workers", 0, "push", "latency_s"), -1.0, "full.workers.0.push.latency_s=-1.0 is not possible"),
        (("server",), {"apply_s": 1.0}, "is missing"),
        (("workers",), data["full"]["workers"] * 2, "the profile has 1 workers, and full costs of 2"),
    ]:
        broken = json.loads(known.to_json())
        at = broken["full"]
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value
        with pytest.raises(ValueError, match=words) as caught:
            Profile.from_json(json.dumps(broken))
        assert "\n" not in str(caught.value)


def test_nothing_is_measured_in_virtual_time(workplace, capsys) -> None:
    assert main(["profile", "--full", "runtime=sim"]) == 2
    assert "--full measures what is there, and runtime=sim has what is declared" in capsys.readouterr().err


@pytest.mark.slow
def test_processes_are_measured_in_full(workplace, capsys) -> None:
    real = "runtime=local cluster=real cluster.num_workers=2 compression=topk sync=bsp schedule=single tracking=none"
    assert main(["profile", "--full", *real.split(), "run.dir=run"]) == 0
    said = capsys.readouterr().out
    assert "measured in full on 20" in said
    assert "TopK encodes" in said
    full = Profile.from_json(Path("run/profile.json").read_text()).full
    assert full is not None
    assert full.versions.keys() == {"ashl", "python", "torch"}
    assert all(worker.push.seconds(38_440) > 0 and worker.alone_s for worker in full.workers)
    timed = ["runtime=sim", "cluster=profile", "profile=run/profile.json", "runtime.gradients=false", "stop.steps=50"]
    assert main(["train", "-q", *timed, "sync=bsp", "schedule=single", "tracking=none", "run.dir=sim"]) == 0
