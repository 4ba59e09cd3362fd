"""`ashl profile` on processes, for workers that sum: by layer group and by message, and the plan
that follows.
"""

import json
from pathlib import Path

import pytest

from ashl.cli.app import main

REAL = (
    "runtime=local cluster=real cluster.num_workers=2 topology=all_reduce sync=bsp overlap=merged"
    " tracking=none"
)


@pytest.mark.slow
def test_a_profile_of_processes_plans_messages(workplace, capsys) -> None:
    assert main(["profile", *REAL.split(), "run.dir=run"]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.partition("note:")[0].splitlines())) <= 80
    profile, plan = (
        json.loads(Path(f"run/{name}.json").read_text()) for name in ("profile", "plan")
    )
    assert sum(profile["group_bytes"]) == profile["dense_bytes"]
    for worker in profile["workers"]:
        assert len(worker["forward_s"]) == len(worker["backward_s"]) == len(profile["group_bytes"])
        assert 0 < sum(worker["forward_s"] + worker["backward_s"]) < 10 * worker["step_s"]
        assert worker["push_line"]["s_per_byte"] >= 0
    assert profile["all_reduce"]["latency_s"] > 0
    assert 0 <= (profile["contention"] or {"pace_reduction": 0})["pace_reduction"] < 1
    assert sum(plan["stages"][0]["overlap"]["plan"]) == len(profile["group_bytes"])
    assert plan["shares"] == sorted(plan["shares"])
    assert plan["shares"][-1] == 1
    assert main(["profile", *REAL.split(), "profile=run/profile.json", "--dry-run"]) == 2
    assert "there is nothing to measure; drop profile=" in capsys.readouterr().err


def test_a_dry_run_of_a_profile_needs_no_costs(workplace, capsys) -> None:
    assert main(["profile", *REAL.split(), "--dry-run"]) == 0
    assert (
        "stage profile: measures steps and exchanges, without training" in capsys.readouterr().out
    )


def test_a_job_without_a_server_is_not_profiled(workplace, capsys, monkeypatch) -> None:
    for key, value in {
        "RANK": "0",
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29977",
    }.items():
        monkeypatch.setenv(key, value)
    assert main(["profile", *REAL.split()]) == 2
    assert "profile with topology=parameter_server and one more process" in capsys.readouterr().err
