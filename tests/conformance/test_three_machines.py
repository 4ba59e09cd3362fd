"""Three machines behind unequal links, where nothing says which interface to take and each
machine's own name is loopback: a job of theirs works, its server is where it should be, and its
records are with process 0.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.namespaces import address, machines, missing, start

RUN = (
    "runtime=torchrun cluster=real tracking=none topology=parameter_server sync=bsp"
    " model.hidden=[1000] stop.steps=60 eval.every_commits=1000 run.dir=run"
)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def names():
    """Named by their addresses, the best link first."""
    if why := missing():
        pytest.skip(why)
    with machines(1000, 200, 50) as made:
        yield made


def outcome(jobs: Sequence[subprocess.Popen], folder: Path, first: str) -> tuple[str, dict]:
    """Return the output and the summary; both exist only on the machine of rank 0."""
    try:
        said = {job.args[3]: job.communicate(timeout=120)[0] for job in jobs}
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [0, 0, 0], said
    assert [name for name in said if "run folder" in said[name]] == [first]
    assert [path.parent.name for path in folder.glob("*/run")] == [first]
    return said[first], json.loads((folder / first / "run" / "summary.json").read_text())


def by_hand(names: Sequence[str], folder: Path, *more: str) -> tuple[str, dict]:
    """Ranks in this order. The first one knows itself by its name, which is 127.0.1.1 there."""
    jobs = []
    for rank, name in enumerate(names):
        master = name if rank == 0 else address(names[0])
        world = {
            "WORLD_SIZE": "3",
            "RANK": str(rank),
            "MASTER_ADDR": master,
            "MASTER_PORT": "29500",
        }
        jobs.append(
            start(
                name,
                [sys.executable, "-m", "ashl.cli", "train", *RUN.split(), *more],
                folder / name,
                world,
            )
        )
    return outcome(jobs, folder, names[0])


def test_the_server_is_on_the_best_link_and_the_records_with_process_0(
    names: list[str], tmp_path: Path
) -> None:
    """In the order of nodes that had it behind the slowest link."""
    best, middle, slowest = names
    said, slow = by_hand([slowest, middle, best], tmp_path / "slow")
    assert f"the server runs on host {slowest}" in said
    assert [host["host"] for host in slow["hosts"]] == [middle, best, slowest]
    said, fast = by_hand(
        [slowest, middle, best], tmp_path / "fast", f"cluster.hosts=[{slowest},{middle}]"
    )
    assert f"the server runs on host {best}" in said
    assert [host["host"] for host in fast["hosts"]] == [slowest, middle, best]
    assert fast["steps_per_s"] > 1.3 * slow["steps_per_s"]


@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_under_torchrun(names: list[str], tmp_path: Path, rendezvous: str) -> None:
    """Ranks follow --node-rank with a static rendezvous; with c10d nodes are numbered by their
    addresses.
    """
    there = list(reversed(names))
    meeting = address(there[0])
    jobs = []
    for rank, name in enumerate(there):
        place = [f"--node-rank={rank}", f"--master-addr={meeting}", "--master-port=29500"]
        if rendezvous == "c10d":
            place = ["--rdzv-backend=c10d", f"--rdzv-endpoint={meeting}:29500", "--rdzv-id=job"]
            place += [f"--rdzv-conf=is_host={int(rank == 0)}", f"--local-addr={address(name)}"]
        agent = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=3",
            "--nproc-per-node=1",
            *place,
        ]
        jobs.append(
            start(name, [*agent, "-m", "ashl.cli", "train", *RUN.split()], tmp_path / name, {})
        )
    first = there[0] if rendezvous == "static" else names[0]
    said, summary = outcome(jobs, tmp_path, first)
    assert f"the server runs on host {first}" in said
    assert summary["hosts"][2]["host"] == first
