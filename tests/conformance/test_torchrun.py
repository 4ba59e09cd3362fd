"""Under torchrun, where ranks share the job's store and nothing else: no folder, and perhaps no
machine.
"""

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.engines import free_port

TWO = [
    "cluster.compute=[1,1]",
    "cluster.link=null",
    "cluster.step_s=0.005",
    "cluster.exchange_s=0.001",
]
SHORT = [
    *TWO,
    "topology=gossip",
    "sync=d_psgd",
    "topology.graph=ring",
    "runtime=torchrun",
    "tracking=none",
    "stop.steps=80",
    "eval.every_commits=20",
    "run.dir=run",
    "--quiet",
]


def start(folder: Path, more: Sequence[str] = (), **env: str) -> subprocess.Popen:
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", "ashl.cli", "train", *SHORT, *more],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_ranks_on_machines_of_their_own(tmp_path: Path) -> None:
    """The run is whole, evaluated on the way and at its end, in one of the folders; the others are
    as they were.
    """
    folders = [tmp_path / str(rank) for rank in range(2)]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    jobs = [start(folder, RANK=str(r), **world) for r, folder in enumerate(folders)]
    try:
        said = [job.communicate(timeout=100)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [0, 0], said
    assert [path.name for folder in folders for path in folder.iterdir()] == ["run"]
    run = folders[0] / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["final"]["test_accuracy"] == lines[-1]["test/acc"] > 0.5
    assert len(lines) > 1


@pytest.mark.slow
def test_another_configuration_on_the_second_process_ends_both(tmp_path: Path) -> None:
    """It hung, on the first one for ever."""
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    more_of = ([], ["seed=2"])
    folders = [tmp_path / str(rank) for rank in range(2)]
    jobs = [start(folder, more_of[r], RANK=str(r), **world) for r, folder in enumerate(folders)]
    host = platform.node()
    said = (
        f"ashl: rank 1 on {host} has seed=2 and rank 0 on {host} has seed=0; give every process the"
        " same overrides\n"
    )
    assert [job.communicate(timeout=60)[0] for job in jobs] == [said, said]
    assert [job.returncode for job in jobs] == [2, 2]
    assert not [path for folder in folders for path in folder.iterdir()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "more", "code", "said"),
    [
        (
            1,
            "runtime.interface=eth77",
            2,
            "runtime.interface=eth77: .* has no interface 'eth77' with an address; ",
        ),
        (1, "dataset=mnist", 3, "Data set MNIST is missing or incomplete in "),
        (0, "run.dir=/dev/null/run", 2, "Cannot write to the run folder /dev/null/run"),
    ],
)
def test_what_one_process_cannot_do_ends_all(
    tmp_path: Path, rank: int, more: str, code: int, said: str
) -> None:
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    more_of = [[more] if r == rank else [] for r in range(2)]
    jobs = [start(tmp_path / str(r), more_of[r], RANK=str(r), **world) for r in range(2)]
    outputs = [job.communicate(timeout=60)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [code, code], outputs
    for line in outputs:
        assert re.fullmatch(rf"ashl: (rank {rank} on .*: )?{said}.*\n", line), outputs


@pytest.mark.slow
def test_a_profile_lies_with_rank_0_and_says_where_it_was_measured(tmp_path: Path) -> None:
    """The server is the last rank; the others leave without a word."""
    world = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [
        sys.executable,
        "-m",
        "ashl.cli",
        "profile",
        *TWO,
        "runtime=torchrun",
        "run.dir=run",
        "--quiet",
    ]
    quiet = os.environ | {"OMP_NUM_THREADS": "1"} | world
    folders = [tmp_path / str(rank) for rank in range(3)]
    jobs = []
    for rank, folder in enumerate(folders):
        folder.mkdir()
        jobs.append(
            subprocess.Popen(
                command, cwd=folder, env=quiet | {"RANK": str(rank)}, stderr=subprocess.PIPE
            )
        )
    said = [job.communicate(timeout=100)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0, 0], said
    assert [len(list(folder.glob("run/profile.json"))) for folder in folders] == [1, 0, 0]
    profile = json.loads((folders[0] / "run" / "profile.json").read_text())
    host = platform.node()
    assert [(w["host"], w["device"]) for w in profile["workers"]] == [(host, "cpu")] * 2
    assert profile["server_host"] == host
