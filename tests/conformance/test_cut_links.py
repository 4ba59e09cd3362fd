"""Three machines under a launcher like torchrun, with one fault each.

A machine loses its network (24 times) or its process, or hangs. If it has a worker alone, the
others continue. Else every process of every machine ends within twice the timeout, and the failed
one is named.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from ashl.tracking import jsonl
from tests.disturbed import wait_for
from tests.namespaces import address, cut, machines, missing, start

TIMEOUT_S = 10.0
RUN = (
    f"runtime=torchrun runtime.heartbeat_timeout_s={TIMEOUT_S} cluster=real tracking=none"
    " tracking.events=all model.hidden=[8] stop.seconds=100 run.dir=run --quiet"
)
MODES = {
    "bsp": "sync=bsp",
    "ssp": "sync=ssp",
    "all_reduce": "topology=all_reduce sync=bsp",
}
GOSSIP = {"ad_psgd": "topology=gossip sync=ad_psgd"}
APART = {
    f"{name}, its server apart": f"{mode} cluster.hosts=[{{0}},{{1}}]"
    for name, mode in (MODES | GOSSIP).items()
    if name != "all_reduce"
}
GROUPS = "topology=partial_all_reduce sync=ripples_random sync.group_size=2"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Job(NamedTuple):
    names: list[str]
    processes: list[subprocess.Popen]

    def home(self) -> int:
        """Return the machine of the controller."""
        found = [
            k
            for k, process in enumerate(self.processes)
            if Path(folder_of(process), "run").exists()
        ]
        return found[0]


def under_way(events: Path) -> bool:
    return events.is_file() and events.stat().st_size > 0


def folder_of(process: subprocess.Popen) -> str:
    return os.readlink(f"/proc/{process.pid}/cwd")


@pytest.fixture
def job(tmp_path: Path, request) -> Iterator[Job]:
    """A run that has started on three machines."""
    if why := missing():
        pytest.skip(why)
    with machines(1000, 1000, 1000) as names:
        world = {"WORLD_SIZE": "3", "MASTER_ADDR": address(names[0]), "MASTER_PORT": "29500"}
        world |= {"GLOO_SOCKET_IFNAME": "eth0"}
        mode = {**MODES, **GOSSIP, **APART, "groups": GROUPS}[request.param]
        command = ["-m", "ashl.cli", "train", *RUN.split(), *mode.format(*names).split()]
        folders = [tmp_path / str(rank) for rank in range(3)]

        made = Job(
            names,
            [
                start(name, [sys.executable, *command], folders[k], world | {"RANK": str(k)})
                for k, name in enumerate(names)
            ],
        )
        try:
            end = time.monotonic() + 60
            while not any(under_way(folder / "run/events.jsonl") for folder in folders):
                assert time.monotonic() < end, [process.poll() for process in made.processes]
                time.sleep(0.05)
            yield made
        finally:
            for process in made.processes:
                for child in (
                    [*psutil.Process(process.pid).children(recursive=True)]
                    if process.poll() is None
                    else []
                ):
                    child.kill()
                process.kill()
                process.wait()
                assert process.stdout
                process.stdout.close()


def ended(job: Job, act: Callable[[], object], but: Sequence[int] = ()) -> list[str]:
    """Inject a fault into a run; return the output of every machine except these, in time and with
    no process left.
    """
    family = [
        child
        for process in job.processes
        for child in psutil.Process(process.pid).children(recursive=True)
    ]
    act()
    since, took, limit_s = time.monotonic(), {}, 2 * TIMEOUT_S
    while len(took) < len(job.processes) and time.monotonic() < since + limit_s:
        took |= {
            k: time.monotonic() - since
            for k, p in enumerate(job.processes)
            if k not in took and p.poll() is not None
        }
        time.sleep(0.05)
    assert len(took) == len(job.processes), f"only {took} have ended"
    _, alive = psutil.wait_procs(family, timeout=3)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    printed = [process.communicate()[0] for process in job.processes]
    assert all(
        process.returncode == 1 for k, process in enumerate(job.processes) if k not in but
    ), printed
    lines = [[line for line in text.splitlines() if line.startswith("ashl: ")] for text in printed]
    return [line[-1] for k, line in enumerate(lines) if k not in but]


def goes_on(job: Job, who: int, act: Callable[[], object]) -> tuple[str, int, str]:
    """Inject a fault into this machine's process: the others detect it in time, continue, and end
    in order when they are asked to. Return why it failed, how it ended, and its last words.
    """
    home = job.home()
    events = Path(folder_of(job.processes[home]), "run/events.jsonl")
    act()
    wait_for(lambda: '"worker_failed"' in events.read_text(), 2 * TIMEOUT_S)
    size = events.stat().st_size
    wait_for(lambda: '"round"' in events.read_text()[size:])
    code = job.processes[who].wait(2 * TIMEOUT_S)
    job.processes[home].send_signal(signal.SIGINT)
    assert [job.processes[k].wait(30) for k in range(3) if k != who] == [
        130 if k == home else 0 for k in range(3) if k != who
    ]
    said = [
        line
        for line in job.processes[who].communicate()[0].splitlines()
        if line.startswith("ashl: ")
    ]
    (why,) = [event["reason"] for event in jsonl.read(events) if event["kind"] == "worker_failed"]
    return why, code, said[-1] if said else ""


@pytest.mark.parametrize("who", [1, 2])
@pytest.mark.parametrize("job", MODES, indirect=True)
def test_a_workers_link_is_cut(job: Job, who: int) -> None:
    why, code, said = goes_on(job, who, lambda: cut(job.names[who]))
    assert (why, code) == (f"sent no heartbeat for {TIMEOUT_S:g} s", 1)
    assert "the job's store at " in said


@pytest.mark.parametrize("job", ["bsp", "ssp"], indirect=True)
def test_the_link_of_the_store_is_cut(job: Job) -> None:
    """The link of the store, the controller and the server, on one machine, is cut: the other
    machines name it.
    """
    said = ended(job, lambda: cut(job.names[0]))
    store = (
        rf"the job's store at {re.escape(address(job.names[0]))}:\d+ did not answer for"
        rf" {TIMEOUT_S:g} s"
    )
    assert all(re.search(store, sentence) for sentence in said[1:]), said
    assert "sent no heartbeat for" in said[0]


@pytest.mark.parametrize("job", APART, indirect=True)
def test_the_link_of_a_server_is_cut_that_is_neither_at_home_nor_at_the_store(job: Job) -> None:
    said = ended(job, lambda: cut(job.names[2]))
    who = (
        rf"the (server|coordinator) \(rank 2\) on {job.names[2]} sent no heartbeat for"
        rf" {TIMEOUT_S:g} s"
    )
    assert re.search(who, said[0])
    assert re.search(who, said[1])
    assert "the job's store at " in said[2]


@pytest.mark.parametrize("job", ["groups"], indirect=True)
def test_the_link_of_a_worker_is_cut_whom_others_may_wait_for(job: Job) -> None:
    """Groups may wait for it in a sum, which cannot be aborted: the run ends."""
    said = ended(job, lambda: cut(job.names[1]))
    assert f"on {job.names[1]} sent no heartbeat for {TIMEOUT_S:g} s" in said[0]


@pytest.mark.parametrize("job", [*MODES, *GOSSIP], indirect=True)
def test_a_link_is_cut_for_a_while(job: Job) -> None:
    """A process with heartbeats again within the timeout was only late."""
    events = Path(folder_of(job.processes[job.home()]), "run/events.jsonl")
    cut(job.names[2])
    time.sleep(TIMEOUT_S / 3)
    cut(job.names[2], down=False)
    size = events.stat().st_size
    wait_for(lambda: '"rank":1' in events.read_text()[size + 20_000 :])
    assert '"worker_failed"' not in events.read_text()
    assert [process.poll() for process in job.processes] == [None] * 3
