"""Costs by layer group and by message: in virtual time as declared, and the plans that follow from
them.
"""

import json
from dataclasses import asdict, replace
from itertools import accumulate
from pathlib import Path

import pytest

from ashl.cli.app import main
from ashl.cluster.network import make_network
from ashl.cluster.spec import ContentionCosts
from ashl.cluster.speed import LEVELS, speed_of
from ashl.config.compose import compose
from ashl.config.construct import construct
from ashl.errors import UsageError
from ashl.learn.learner import Learner
from ashl.overlap.timeline import FORWARD, untimed_timeline
from ashl.plan.alpha_beta import LARGE, SMALL, AlphaBeta, fit_line
from ashl.plan.profile import CodecCost, Profile
from ashl.planning.compile_plan import prepare_plan
from ashl.planning.instantiate import declared_profile, layer_groups
from ashl.planning.layer_group_costs import with_layer_group_costs
from tests.benchmarks.simulator import simulation
from tests.support import planned, run, simulated

LINKS = (
    "cluster.exchange_s=null cluster.bandwidth_mbit_s=80 cluster.latency_s=0.002"
    " cluster.step_s=0.03"
)
CLUSTER = ("cluster.compute=[1,1,2]", "cluster.link=[1,3,1]", *LINKS.split())
MODEL = ("model.hidden=[64,32]",)
RING = ("topology=all_reduce", "sync=bsp", *MODEL)
OF_PROFILE = ("cluster=profile", "profile=profile.json", "tracking=none")
TIMED = ("runtime.gradients=false", "stop.steps=30")


def declared(*overrides: str) -> Profile:
    """Return the profile of a cluster in virtual time by `ashl profile`."""
    plan, parts, data = prepare_plan(
        compose(["runtime=sim", "sync=bsp", *CLUSTER, *(overrides or MODEL)])
    )
    batch = plan.stages[0].workers[0].batch
    profile = declared_profile(parts.cluster, plan.choices["model"], plan.num_params, batch)
    assert profile is not None
    return with_layer_group_costs(
        profile, plan, Learner(parts.model, data, parts.task, seed=0), parts.cluster
    )


def test_a_line_is_fitted_to_large_messages_and_to_small_ones() -> None:
    """A token bucket lets small ones pass ten times as fast, and now and then something
    else runs.
    """
    true = AlphaBeta(0.002, 1e-8)
    quiet = {n: [true.seconds(n)] * 3 for n in (*SMALL, *LARGE)}
    assert fit_line(quiet).latency_s == pytest.approx(0.002)
    shaped = {
        n: [0.002 + (1e-9 if n < LARGE[0] else 1e-8) * n + noise for noise in (0, 0, 0.5)]
        for n in quiet
    }
    found = fit_line(shaped)
    assert (found.latency_s, found.s_per_byte) == (
        pytest.approx(0.002, rel=0.03),
        pytest.approx(1e-8),
    )
    assert fit_line({n: [1.0 - 1e-9 * n] for n in quiet}).s_per_byte == 0


def test_a_declared_cluster_has_its_own_costs_by_part() -> None:
    """A ring of three, the slow link last to be over: 2(g − 1) hops, and as many chunks of
    a third.
    """
    profile, groups = declared(), layer_groups(planned(*RING, *CLUSTER, "overlap=wfbp"))
    assert profile.group_bytes == untimed_timeline(groups).nbytes
    assert profile.shares == pytest.approx([group.ready for group in groups])
    for worker in profile.workers:
        assert sum(worker.forward_s) == pytest.approx(FORWARD * worker.step_s)
        assert sum(worker.forward_s + worker.backward_s) == pytest.approx(worker.step_s)
    lines = [
        (line.latency_s, line.s_per_byte)
        for w in profile.workers
        for line in (w.push_line, w.pull_line)
        if line
    ]
    assert lines == [
        pytest.approx(cost)
        for cost in [(0.002, 1e-7)] * 2 + [(0.006, 3e-7)] * 2 + [(0.002, 1e-7)] * 2
    ]
    assert profile.all_reduce is not None
    assert profile.all_reduce.s_per_byte == pytest.approx(4 / 3 * 3e-7, rel=0.2)


@pytest.mark.parametrize(
    "overrides", [MODEL, ("runtime.gradients=false",), ("model=cnn", "dataset.batch_size=8")]
)
def test_what_is_measured_is_what_is_declared(overrides) -> None:
    ran = simulated("schedule=profile_only", "schedule.per_layer_group=true", *CLUSTER, *overrides)
    found, expected = (
        json.loads(ran.of("ProfileMeasured")[0]["profile"]),
        json.loads(declared(*overrides).to_json()),
    )
    for key in ("group_bytes", "all_reduce"):
        assert found[key] == pytest.approx(expected[key], rel=1e-6)
    for worker, said in zip(found["workers"], expected["workers"], strict=True):
        for key in ("forward_s", "backward_s", "push_line", "pull_line"):
            assert worker[key] == pytest.approx(said[key], rel=1e-6, abs=1e-9), key


def test_one_worker_sums_with_nobody(workplace) -> None:
    assert main(["profile", "runtime=sim", *RING, "cluster.compute=[1]", "run.dir=one"]) == 0
    assert json.loads(Path("one/profile.json").read_text())["all_reduce"] is None
    ran = simulated("schedule=profile_only", "schedule.per_layer_group=true", "cluster.compute=[1]")
    assert json.loads(ran.of("ProfileMeasured")[0]["profile"])["all_reduce"] is None


def measured(**changes: object) -> Profile:
    """Return costs as measured, with a step whose last group is ready at once."""
    profile = replace(declared(), source="measured", all_reduce=AlphaBeta(0.005, 1e-7), **changes)
    workers = tuple(
        replace(w, forward_s=(0.0, 0.0, 0.001), backward_s=(0.001, 0.002, 0.006))
        for w in profile.workers
    )
    profile = replace(profile, workers=workers)
    Path("profile.json").write_text(profile.to_json())
    return profile


def test_a_profile_gives_the_same_plan_in_virtual_time_and_on_processes(workplace) -> None:
    profile = measured()
    sim = planned(*RING, *TIMED, "overlap=merged", "cluster=profile", "profile=profile.json")
    real = planned(
        *RING,
        "overlap=merged",
        "runtime=local",
        "cluster=real",
        "cluster.num_workers=3",
        "profile=profile.json",
    )
    assert sim.shares == real.shares == pytest.approx((0.2, 0.4, 1.0))
    assert sim.stages[0].overlap == real.stages[0].overlap
    note = next(note for note in real.notes if "a step and its all-reduce" in note)
    assert note in sim.notes
    groups, step_ns, end_ns = layer_groups(sim), 0.06e9, 0.0
    counts = sim.stages[0].overlap["plan"]
    for last, count in zip(accumulate(counts), counts, strict=True):
        nbytes = sum(profile.group_bytes[last - count : last])
        end_ns = max(end_ns, step_ns * groups[last - 1].ready) + 0.005e9 + 100 * nbytes
    assert float(note.split()[6]) * 1e6 == pytest.approx(end_ns, rel=1e-3)
    assert simulation(sim)().now_ns == pytest.approx(10 * end_ns, rel=1e-6)


@pytest.mark.parametrize("start_s", [0.0, 0.002])
@pytest.mark.parametrize("overlap", ["wfbp", "merged overlap.plan=[2,1]", "merged", "priority"])
def test_virtual_time_has_what_sums_and_computing_cost_each_other(
    workplace, overlap, start_s
) -> None:
    """The time follows the plan's timeline; it is incomplete if collectives overlap the next
    forward pass.
    """
    costs = ContentionCosts(pace_reduction=0.4, collective_slowdown=1.5, start_s=start_s)
    measured(contention=costs)
    plan = planned(
        *RING, *TIMED, f"overlap={overlap}".split()[0], *overlap.split()[1:], *OF_PROFILE
    )
    (note,) = [note for note in plan.notes if "a step and its all-reduce" in note]
    assert "computes 40 % slower, as measured" in note
    said = note.partition(" take ")[2]
    cycle_ms = 3e3 / plan.stages[0].predicted_steps_per_s
    cycles = [worker.predicted_cycle_s for worker in plan.stages[0].workers]
    assert max(cycles) == pytest.approx(cycle_ms / 1e3)
    if overlap == "priority":
        assert cycle_ms > float(said.removeprefix("at least ").split()[0])
    else:
        assert cycle_ms == pytest.approx(float(said.split()[0]), rel=1e-3)
    if overlap == "merged":
        assert plan.stages[0].overlap["plan"] == (3,), "hiding it costs more than it gains"


def test_what_sums_and_computing_cost_each_other_is_measured(workplace) -> None:
    plan = planned("schedule=profile_only", "schedule.per_layer_group=true", *CLUSTER, *MODEL)
    for start_s in (0.0, 0.002):
        costs = ContentionCosts(pace_reduction=0.4, collective_slowdown=1.5, start_s=start_s)
        ran = run(replace(plan, cluster=measured(contention=costs).cluster()))
        found = json.loads(ran.of("ProfileMeasured")[0]["profile"])["contention"]
        assert found == pytest.approx(asdict(costs), rel=0.05, abs=1e-5)


def test_where_parts_cost_more_than_they_hide_a_gradient_goes_in_one_piece(workplace) -> None:
    """The plan agrees with the run's clock to the nanosecond, and in the bits."""
    of = (*RING, "stop.steps=6", *OF_PROFILE)
    ends = []
    for start_s, overlap in ((0.0, "merged"), (0.2, "merged"), (0.2, "none"), (0.2, "wfbp")):
        measured(
            contention=ContentionCosts(pace_reduction=0.0, collective_slowdown=1.0, start_s=start_s)
        )
        ran = simulated(*of, f"overlap={overlap}")
        ends.append((ran.time_ns, ran.sha256))
    assert len({sha256 for _, sha256 in ends}) == 1
    assert ends[0][0] < ends[1][0] == ends[2][0] < ends[3][0]


def test_a_profile_that_does_not_say_enough_is_refused(workplace) -> None:
    whole = measured()
    given = (
        *RING,
        "runtime=local",
        "cluster=real",
        "cluster.num_workers=3",
        "profile=profile.json",
    )
    Path("profile.json").write_text(whole.without_parts().to_json())
    with pytest.raises(UsageError, match="profile again with `ashl profile`, or take"):
        planned(*given, "overlap=merged")
    assert planned(*given, "overlap=merged", "overlap.plan=bytes").shares == ()
    sizes = (whole.group_bytes[0] - 4, whole.group_bytes[1] + 4, whole.group_bytes[2])
    Path("profile.json").write_text(replace(whole, group_bytes=sizes).to_json())
    with pytest.raises(
        UsageError, match="the profile is of other layer groups than the model has; profile again"
    ):
        planned(*given, "overlap=merged")
    with pytest.raises(
        ValueError, match="schema 2 where schema 5 was expected; make the file again"
    ):
        Profile.from_json(json.dumps({**json.loads(whole.to_json()), "schema": 2}))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"group_bytes": [4]}, "has 1 layer groups, and a worker with costs of another number"),
        ({"group_bytes": None}, "group_bytes=null is not possible: should be a list"),
        (
            {"all_reduce": {"latency_s": -1, "s_per_byte": 0}},
            r"all_reduce\.latency_s=-1 is not possible",
        ),
        ({"all_reduce": {"latency_s": 1}}, r"all_reduce\.s_per_byte is missing"),
        (
            {"contention": {"pace_reduction": 1.5, "collective_slowdown": 1}},
            r"contention\.pace_reduction=1\.5 is not possible",
        ),
        ({"contention": 3}, "contention=3 is not possible: should be keys and values"),
    ],
)
def test_a_broken_profile(change, says) -> None:
    data = json.loads(declared().to_json())
    with pytest.raises(ValueError, match=says):
        Profile.from_json(json.dumps({**data, **change}))


def test_steps_are_drawn_from_the_measured_distribution(workplace) -> None:
    """A step of every worker takes 1 to 3 times its median, in the mean what the quantiles say."""
    profile = measured()
    times = tuple(0.03 * (1 + 2 * level) / 2 for level in LEVELS)
    workers = tuple(replace(worker, step_s=0.03, step_times_s=times) for worker in profile.workers)
    profile = replace(profile, workers=workers)
    assert Profile.from_json(profile.to_json()) == profile
    speed = speed_of(construct(profile.cluster(), "cluster"), batch=32, seed=0)
    drawn = [speed.cost_ns(0, "compute", 32, 0) / 1e9 for _ in range(4000)]
    assert min(drawn) >= 0.015
    assert max(drawn) <= 0.045
    assert sum(drawn) / len(drawn) == pytest.approx(0.03, rel=0.02)
    with pytest.raises(ValueError, match="step_times_s has 2 quantiles"):
        replace(workers[0], step_times_s=(0.1, 0.2))


def test_codecs_are_timed_by_name_and_cost_what_was_measured(workplace) -> None:
    """In virtual time an encoding takes what the cluster declares, and so the profile says."""
    topk = "ashl.compression.topk.TopK"
    ran = simulated(
        "schedule=profile_only",
        "schedule.per_layer_group=true",
        *CLUSTER,
        *MODEL,
        "compression=topk",
        "cluster.compress_s=0.25",
    )
    found = Profile.from_json(ran.of("ProfileMeasured")[0]["profile"])
    assert [own.codec for own in found.codecs] == [topk]
    assert found.codecs[0].encode_s == pytest.approx((0.25,) * 3)
    cost = CodecCost(codec=topk, encode_s=(0.5, 0.6, 0.7), decode_s=0.01)
    spec = replace(found, codecs=(cost,)).cluster(topk)
    assert spec["encode_s"] == [0.5, 0.6, 0.7]
    assert spec["server_step_s"] == pytest.approx(found.server_step_s + 0.01)
    assert replace(found, codecs=(cost,)).cluster("another")["encode_s"] == [
        w.compress_s for w in found.workers
    ]
    with pytest.raises(ValueError, match="and costs of ashl"):
        replace(found, codecs=(replace(cost, encode_s=(0.5,)),))


def test_links_have_a_latency_for_each_direction(workplace) -> None:
    """A message of the dense model takes what was measured, and an empty one the latency of an
    empty one.
    """
    cluster = construct(measured().cluster(), "cluster")
    ports, profile = make_network(cluster, 4), measured()
    for rank, worker in enumerate(profile.workers):
        nbytes = profile.dense_bytes
        assert ports.transfer_ns(rank, 3, nbytes) == pytest.approx(worker.push_s * 1e9, rel=1e-6)
        assert ports.transfer_ns(3, rank, nbytes) == pytest.approx(worker.pull_s * 1e9, rel=1e-6)
        assert ports.transfer_ns(rank, 3, 0) == pytest.approx(worker.latency_s * 1e9)
