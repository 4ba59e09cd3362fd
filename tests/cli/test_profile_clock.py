"""`profile=FILE` in virtual time: the clock runs by what the profile says, and never by a
mixture.
"""

from pathlib import Path

import pytest

from ashl.config.construct import construct
from ashl.plan.declared_costs import profile_of_declared_costs
from ashl.plan.profile import Profile
from ashl.planning.compile_plan import TAKES_COSTS
from tests.support import planned, simulated

TIMED = ["runtime.gradients=false", "schedule=single", "stop.steps=60"]
FILE = "profile=profile.json"
LINKS = "cluster.exchange_s=null cluster.bandwidth_mbit_s=20 cluster.latency_s=0.001"
DECLARED = {
    "exchange": "cluster=mixed",
    "jitter": "cluster=ashl_paper cluster.jitter=0.2 cluster.compress_s=0.003",
    "free exchange": "cluster=homogeneous cluster.exchange_s=0 cluster.server_step_s=0.001",
    "links": f"cluster=mixed {LINKS} cluster.server_bandwidth_mbit_s=30",
}


def profiled(*overrides: str) -> Profile:
    """The profile of a declared cluster, as a file."""
    plan = planned(*TIMED, "sync=bsp", *overrides)
    found = profile_of_declared_costs(
        construct(plan.cluster, "cluster"), plan.choices["model"], plan.num_params, 32
    )
    Path("profile.json").write_text(found.to_json())
    return found


@pytest.mark.parametrize("declared", DECLARED)
def test_a_profile_of_a_declared_cluster_costs_what_the_cluster_does(
    declared: str, workplace
) -> None:
    """The clock agrees to the nanosecond, also for waiting workers; on the profile's own cluster
    nothing is replaced.
    """
    cluster = DECLARED[declared].split()
    profiled(*cluster)
    for rules in ("sync=asp compression=topk", "sync=bsp topology=all_reduce"):
        own = planned(*TIMED, *cluster, *rules.split())
        assert planned(*TIMED, "cluster=profile", FILE, *rules.split()).stages == own.stages
    own, measured = (
        simulated(*TIMED, "sync=bsp", *given) for given in (cluster, ["cluster=profile", FILE])
    )
    assert (measured.time_ns, measured.ledgers) == (own.time_ns, own.ledgers)
    assert planned(*TIMED, *cluster, "sync=bsp", FILE).cluster == own.plan.cluster


@pytest.mark.parametrize("cluster", ["cluster=one_slow", "cluster=real"])
def test_a_profile_drives_the_clock_of_another_cluster(cluster: str, workplace) -> None:
    """A profile precedes cluster.*: a measured cost is the same with any declared cluster."""
    profiled("cluster=mixed")
    ran = simulated(*TIMED, "sync=bsp", cluster, FILE)
    assert TAKES_COSTS in ran.plan.notes
    assert ran.time_ns == simulated(*TIMED, "sync=bsp", "cluster=mixed").time_ns
    assert ran.plan.stages[0].predicted_steps_per_s == pytest.approx(50.0)  # one_slow has 38.1


def test_what_runs_on_real_machines_is_predicted_from_their_profile(workplace) -> None:
    profiled("cluster=mixed")
    real = [
        "runtime=local",
        "cluster=real",
        "cluster.num_workers=4",
        "schedule=single",
        "sync=bsp",
    ]
    assert planned(*real).stages[0].predicted_steps_per_s is None
    assert planned(*real, FILE).stages[0].predicted_steps_per_s == pytest.approx(50.0)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            "cluster=profile",
            "cluster=profile: needs a profile; add profile=FILE",
        ),
        (f"cluster=profile runtime=local {FILE}", "take runtime=sim, or cluster=real"),
        (f"cluster=profile cluster.num_workers=3 {FILE}", "4 workers and the cluster has 3"),
        (f"cluster=ashl_paper {FILE}", "4 workers and the cluster has 3"),
        (f"cluster=profile model=cnn {FILE}", "the model mlp and this one is cnn"),
        (
            f"cluster=one_slow cluster.events=[{{time_s:1,worker:0,compute:2}}] {FILE}",
            "remove one of them",
        ),
        (
            "cluster=real cluster.num_workers=4",
            "add the profile=FILE that was measured on this one",
        ),
    ],
)
def test_what_a_profile_cannot_drive_is_refused_with_the_fix(
    overrides: str, words: str, said, workplace
) -> None:
    profiled("cluster=mixed")
    code, sentence = said("sync=bsp", "schedule=single", *overrides.split())
    assert code == 2
    assert words in sentence
