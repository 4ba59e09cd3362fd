"""The storm of `tests.benchmarks.storm`: what it draws, and how it judges."""

from itertools import pairwise
from pathlib import Path

import pytest

from tests.benchmarks.storm import (
    APART_S,
    KINDS,
    OUTAGE_S,
    SYSTEMS,
    AshlRun,
    Commit,
    Processes,
    Storm,
    Strike,
    draw_strikes,
    judge,
    steps_within,
)


@pytest.mark.parametrize("mean_s", [60, 120])
@pytest.mark.parametrize("seed", range(5))
def test_a_storm_is_a_function_of_its_seed_and_ends_before_the_run(mean_s: float, seed: int):
    strikes = draw_strikes(900, mean_s, KINDS, seed)
    assert strikes == draw_strikes(900, mean_s, KINDS, seed)
    times = [0.0, *(strike.time_s for strike in strikes)]
    assert all(b - a >= APART_S for a, b in pairwise(times))
    assert times[-1] + 2 * OUTAGE_S <= 900
    counts = [sum(strike.kind == kind for strike in strikes) for kind in KINDS]
    assert max(counts) - min(counts) <= 1
    assert all(strike.replica == 1 for strike in strikes if strike.kind == "cut")


def test_outcomes_count_commits_of_the_survivor_and_of_the_victim(tmp_path: Path):
    run = AshlRun(SYSTEMS["ashl-local_sgd"], Processes([], tmp_path), 60, zero_s=1000.0)
    storm = Storm(run, done=[Strike(10, 0, "kill")])
    # in the run's clock, which began 5 s before the first commits
    storm.commits = [
        Commit(15.05, 1, 20),  # was in flight
        Commit(15.8, 1, 20),
        Commit(16.0, 0, 20),  # by the victim's earlier process
        Commit(33.0, 0, 20),
        Commit(70.0, 1, 20),  # after the end
    ]
    (outcome,) = judge(storm, 1005.0, 60.0, 60.0, 0)
    assert (outcome.gap_s, outcome.back_s) == (0.8, 18.0)
    assert steps_within(storm, 1005.0, 60.0) == 80


def test_no_commit_until_the_end_is_no_time(tmp_path: Path):
    run = AshlRun(SYSTEMS["ashl-local_sgd"], Processes([], tmp_path), 60, zero_s=0.0)
    storm = Storm(run, done=[Strike(10, 0, "stop")], commits=[Commit(5.0, 1, 20)])
    (outcome,) = judge(storm, 0.0, 60.0, 60.0, 0)
    assert outcome.gap_s is None
    assert outcome.back_s is None
