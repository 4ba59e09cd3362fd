"""A worker of a job is a restart domain: its process is killed and started again, as an engine
does. The processes get RANK and WORLD_SIZE as from an engine.
"""

import json
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.disturbed import wait_for
from tests.engines import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

TRAIN = [sys.executable, "-m", "ashl.cli", "train", "runtime=torchrun", "cluster=real", "-q"]
TRAIN += ["model.hidden=[8]", "tracking=none", "eval.every_s=0.5", "run.dir=run"]
TRAIN += ["cluster.num_workers=3", "stop.seconds=14"]
MODES = {
    "server": ("sync=ssp", 4),
    "all_reduce": ("topology=all_reduce sync=bsp", 3),
    "gossip": ("topology=gossip sync=d_psgd", 3),
    "in groups": ("topology=partial_all_reduce sync=ripples_random", 4),
}


@contextmanager
def job(folder: Path, mode: str) -> Generator[list[subprocess.Popen[bytes]]]:
    """Start a job of this mode, kill rank 1 once a metric is recorded, and start it again. Yields
    the processes by rank, the restarted one last.
    """
    words, size = MODES[mode]
    port = free_port()

    def start(rank: int) -> subprocess.Popen[bytes]:
        known = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env = os.environ | {name: str(value) for name, value in known.items()}
        with (folder / "output").open("a") as file:
            words_of_rank = [*TRAIN, *words.split()]
            return subprocess.Popen(words_of_rank, cwd=folder, env=env, stdout=file, stderr=file)

    ranks = [start(rank) for rank in range(size)]
    try:
        metrics = folder / "run/metrics.jsonl"
        wait_for(lambda: metrics.exists() and metrics.stat().st_size)
        ranks[1].kill()
        ranks[1].wait()
        ranks += [start(1)]
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def check_rejoined(folder: Path) -> None:
    output = (folder / "output").read_text()
    summary = json.loads((folder / "run/summary.json").read_text())
    assert summary["status"] == "finished", output
    (failed,) = summary["failed_workers"]
    assert failed["worker"] == 1
    assert failed["rejoined_s"] is not None, output
    row = summary["workers"][1]
    assert row["down_s"] >= failed["rejoined_s"] - failed["time_s"]
    assert row["steps"] > 0


@pytest.mark.parametrize("mode", MODES)
def test_a_process_that_is_started_again_rejoins(mode: str, tmp_path: Path) -> None:
    with job(tmp_path, mode) as ranks:
        ranks[0].wait(90)
        assert ranks[-1].wait(20) == 0
        check_rejoined(tmp_path)
