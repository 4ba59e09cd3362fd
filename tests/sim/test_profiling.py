"""A profiling stage in virtual time: what it finds is what the cluster declares, and it keeps
within its budget.
"""

import json

import pytest

from ashl.sync.profiling import REPEATS_S
from tests.support import simulated

LINKS = (
    "cluster.exchange_s=null cluster.bandwidth_mbit_s=2 cluster.latency_s=0.01"
    " cluster.server_bandwidth_mbit_s=4"
)
PROFILING = ["schedule=profile_only", "cluster=homogeneous", *LINKS.split()]


def test_a_push_is_measured_alone_and_under_load() -> None:
    """38,440 bytes at 2 Mbit/s and 10 ms; four at once share 4 Mbit/s, which shows the server's
    port.
    """
    ran = simulated(*PROFILING)
    found = json.loads(ran.of("ProfileMeasured")[0]["profile"])
    alone = 0.01 + 38_440 / 250_000
    for worker in found["workers"]:
        assert (worker["push_s"], worker["pull_s"]) == pytest.approx((alone, alone))
        assert (worker["latency_s"], worker["push_noise_s"]) == pytest.approx((0.01, 0))
        assert worker["push_bytes_s"] == pytest.approx(250_000)
    assert max(worker["push_loaded_s"] for worker in found["workers"]) == pytest.approx(
        0.01 + 4 * 38_440 / 500_000
    )
    assert found["server_bytes_s"] == pytest.approx(500_000)
    assert (
        simulated("schedule=profile_only", "cluster=mixed")
        .of("ProfileMeasured")[0]["profile"]
        .count('"server_bytes_s": null')
    )


@pytest.mark.parametrize("seconds", [0.1, 0.5, 1.0])
def test_profiling_ends_with_the_budget(seconds: float) -> None:
    """While steps are timed, while one pushes, and between: no profile, and nobody's time
    goes on.
    """
    ran = simulated(*PROFILING, f"stop.seconds={seconds}")
    assert (ran.end["reason"], ran.time_ns) == ("seconds", round(seconds * 1e9))
    assert not ran.of("ProfileMeasured")
    assert [sum(ledger.values()) for ledger in ran.ledgers] == [ran.time_ns] * 4


def test_jitter_is_measured_until_it_is_known() -> None:
    """Equal workers get equal shares, seed after seed."""
    for seed in range(3):
        ran = simulated(*PROFILING, "cluster.jitter=0.3", f"seed={seed}")
        steps = [
            worker["step_s"]
            for worker in json.loads(ran.of("ProfileMeasured")[0]["profile"])["workers"]
        ]
        assert max(steps) == pytest.approx(min(steps), rel=0.02)


def test_long_noisy_steps_end_with_their_time() -> None:
    """Steps of 10 s with jitter are repeated for at most a minute, however wide the interval is."""
    ran = simulated(
        *PROFILING, "schedule.profile_steps=2", "cluster.step_s=10", "cluster.jitter=0.5"
    )
    assert ran.time_ns / 1e9 < REPEATS_S + 40
    assert ran.of("ProfileMeasured")
