"""Runs of random modes on real processes are killed at random moments and resumed."""

import subprocess
import sys

import pytest

TRIALS = 4


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
def test_each_run_that_is_killed_is_resumed_as_it_should(seed: int) -> None:
    command = [sys.executable, "-m", "tests.benchmarks.resumes", "--trials", str(TRIALS)]
    found = subprocess.run(
        [*command, "--seed", str(seed)], capture_output=True, text=True, check=True
    )
    assert f"{TRIALS} of {TRIALS} as they should" in found.stdout, found.stdout
