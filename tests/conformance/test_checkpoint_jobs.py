"""Jobs of other launchers write checkpoints and resume from them, with and without a shared folder."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conformance.test_checkpoint_processes import LINE, checked
from tests.engines import free_port
from tests.support import simulated

pytestmark = pytest.mark.slow
SAVED = ["tracking=none", "run.dir=run", "run.checkpoint_s=0.4", "runtime=torchrun", "-q"]
TOP_K = ["sync=bsp", "compression=topk", "compression.ratio=0.2"]
LATE = ["topology=all_reduce", "sync=bsp", "overlap=delayed", "optimizer.momentum=0.9"]
PUSH_SUM = ["topology=gossip", "sync=sgp", "sync.overlap=1", "topology.graph=ring"]
GOES_ON = "ashl: restarted: the run in run resumes from its last checkpoint\n"


def started(command: Sequence[str], folder: Path = Path(), **env: str) -> subprocess.Popen:
    folder.mkdir(exist_ok=True)
    known = {
        "cwd": folder,
        "env": os.environ | {"OMP_NUM_THREADS": "1"} | env,
        "start_new_session": True,
    }
    return subprocess.Popen(
        [sys.executable, "-m", *command], stderr=subprocess.PIPE, text=True, **known
    )


def torchrun(size: int, *train: str, restarts: int = 0) -> subprocess.Popen:
    place = ["--standalone", f"--nproc-per-node={size}", f"--max-restarts={restarts}"]
    return started(["torch.distributed.run", *place, "-m", "ashl.cli", "train", *train])


def until_saved(run: Path, *jobs: subprocess.Popen, absent: Sequence[int] = ()) -> None:
    """Wait until a run has a checkpoint without these ranks."""

    def is_saved() -> bool:
        for path in run.glob("checkpoint/*/manifest.json"):
            with suppress(OSError):  # it is being deleted
                if json.loads(path.read_text())["absent"] == [*absent]:
                    return True
        return False

    end = time.monotonic() + 60
    while not is_saved() and time.monotonic() < end:
        time.sleep(0.02)
    assert [job.poll() for job in jobs] == [None] * len(jobs)


def half_written(run: Path) -> None:
    """A newer checkpoint than all, of which a file is cut off, and one that has no manifest yet."""
    whole = max(
        run.glob("checkpoint/*/manifest.json"), key=lambda path: int(path.parent.name)
    ).parent
    for number, names in (
        (900, ("manifest.json", "rank0.safetensors")),
        (901, ("rank0.safetensors",)),
    ):
        (run / f"checkpoint/{number}").mkdir()
        for name in names:
            text = (whole / name).read_bytes()
            (run / f"checkpoint/{number}/{name}").write_bytes(
                text if name == "manifest.json" else text[:1000]
            )


def ended(*jobs: subprocess.Popen) -> list[str]:
    try:
        return [job.communicate(timeout=100)[1] for job in jobs]
    finally:
        for job in jobs:
            job.kill()


@pytest.mark.parametrize(
    ("mode", "size"), [(TOP_K, 3), (LATE, 2), (PUSH_SUM, 2)], ids=["server", "late", "push-sum"]
)
def test_a_job_that_was_killed_as_a_whole(mode: list[str], size: int, workplace: Path) -> None:
    job = torchrun(size, *LINE, *mode, *SAVED)
    until_saved(Path("run"), job)
    os.killpg(job.pid, signal.SIGKILL)
    ended(job)
    again = torchrun(size, "--resume", "run", "-q")
    (said,) = ended(again)
    assert again.returncode == 0, said
    checked(Path("run"), simulated(*LINE, *mode).sha256)


def test_a_torchrun_restart_resumes_from_the_newest_whole_checkpoint(workplace: Path) -> None:
    """A worker is killed, torchrun ends the others and starts all of them again, by the same
    command.
    """
    job = torchrun(3, *LINE, *TOP_K, *SAVED, restarts=1)
    until_saved(Path("run"), job)
    half_written(Path("run"))
    os.kill(worker_of(job), signal.SIGKILL)
    (said,) = ended(job)
    assert job.returncode == 0, said
    assert GOES_ON in said
    assert "900 cannot be resumed from" in said
    checked(Path("run"), simulated(*LINE, *TOP_K).sha256)


def worker_of(job: subprocess.Popen) -> int:
    """The process of rank 1."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            env = path.read_bytes().split(b"\0")
            parent = int(path.with_name("stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == job.pid and b"RANK=1" in env:
            return int(path.parent.name)
    raise AssertionError("there is no rank 1")


def test_ranks_share_no_folder(tmp_path: Path) -> None:
    """Rank 0 keeps the parts of all ranks without a shared folder, and sends them on resume.

    Rank 1 has failed before the checkpoint, so it has no part, and rejoins.
    """
    folders = [tmp_path / str(rank) for rank in range(3)]

    def job(attempt: int) -> list[subprocess.Popen]:
        world = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        world["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
        command = ["ashl.cli", "train", *LINE, "sync=ssp", *SAVED, "stop.steps=800"]
        return [
            started(command, folder, RANK=str(rank), **world) for rank, folder in enumerate(folders)
        ]

    first = job(0)
    until_saved(folders[0] / "run", *first)
    first[1].kill()
    until_saved(folders[0] / "run", first[0], first[2], absent=[1])
    for process in first:
        process.kill()
    ended(*first)
    second = job(1)
    said = ended(*second)
    assert [process.returncode for process in second] == [0, 0, 0], said
    assert said[0].startswith(GOES_ON)
    assert [*folders[1].iterdir(), *folders[2].iterdir()] == []
    summary = json.loads((folders[0] / "run/summary.json").read_text())
    assert summary["status"] == "finished"
    assert 800 <= summary["steps"] == sum(worker["steps"] for worker in summary["workers"])
    (failure,) = summary["failed_workers"]
    assert failure["worker"] == 1
    assert failure["rejoined_s"]
