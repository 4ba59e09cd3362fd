"""Jobs of real engines on this one machine: Slurm with three nodes, Open MPI, MPICH, torchrun with
two agents, sshd on loopback, and Ray. Run with `-m engines -n 0`; as root, with the packages that
`tests.engines.INSTALL` names.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from tests.engines import free_port, missing, slurm, sshd, wait_for

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]

SHORT = ["model.hidden=[8]", "tracking=none", "eval.every_commits=20", "cluster.num_workers=2"]
TOPOLOGIES = {"server": ["sync=bsp"], "all_reduce": ["topology=all_reduce", "sync=bsp"]}
ROOT_MAY = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
# programs of each engine, and the variable that has a process's rank
PROGRAMS = {
    "slurm": ("munged", "slurmctld", "slurmd", "sbatch"),
    "openmpi": ("mpirun.openmpi",),
    "mpich": ("mpiexec.hydra",),
    "torchrun": ("sshd",),
    "ssh": ("sshd",),
    "ray": (),
}
RANKS = {
    "slurm": "SLURM_PROCID",
    "openmpi": "OMPI_COMM_WORLD_RANK",
    "mpich": "PMI_RANK",
    "torchrun": "RANK",
    "ssh": "RANK",
    "ray": "RANK",
}
KINDS = {  # unequal machines: two ranks on the first
    "slurm": "constraint=fast slots=2\nconstraint=slow\n",
    "openmpi": "localhost slots=3\n",
    "mpich": "localhost slots=3\n",
    "torchrun": "127.0.0.1 slots=2\n127.0.0.2\n",
    "ssh": "127.0.0.1 slots=2\n127.0.0.2\n",
    "ray": "fast=1 slots=2\nslow=1\n",
}
RESTART_DOMAINS = [engine for engine in PROGRAMS if engine != "torchrun"]


class Engine(NamedTuple):
    """An engine that runs here: arguments of `ashl launch`, and the environment of its clients."""

    name: str
    options: list[str]
    env: dict[str, str]

    def start(self, folder: Path, words: Sequence[str]) -> subprocess.Popen[str]:
        (folder / "hosts").write_text(KINDS[self.name])
        command = [sys.executable, "-m", "ashl.cli", "launch", *self.options, "--", *words]
        return subprocess.Popen(
            command,
            cwd=folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, folder: Path, words: Sequence[str]) -> None:
        check(self.start(folder, words), folder)


def check(process: subprocess.Popen[str], folder: Path) -> None:
    said = process.communicate(timeout=300)[0]
    logs = "\n".join(path.read_text() for path in folder.glob("ashl-*.out"))
    assert process.returncode == 0, said + logs


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Generator[Callable[[str], Engine]]:
    """Start each engine at its first use, and end all of them after the last test."""
    from contextlib import ExitStack

    quiet = os.environ | {"OMP_NUM_THREADS": "1"} | ROOT_MAY
    known: dict[str, Engine] = {}
    with ExitStack() as stack:

        def make(name: str) -> Engine:
            folder = tmp_path_factory.mktemp(name)
            hosts = ["--hosts", "hosts"]
            if name == "slurm":
                env = stack.enter_context(slurm(folder))
                return Engine(name, ["--on", "slurm", *hosts, "--option=--wait"], quiet | env)
            if name in ("ssh", "torchrun"):
                command = stack.enter_context(sshd(folder, free_port()))
                return Engine(name, ["--on", name, *hosts, "--ssh", command], quiet)
            if name == "ray":
                ray = [sys.executable, "-m", "ray.scripts.scripts"]
                resources = '{"fast": 2, "slow": 1}'
                start = [*ray, "start", "--head", "--num-cpus=8", f"--resources={resources}"]
                subprocess.run([*start, "--port=6390"], check=True, capture_output=True)
                stack.callback(subprocess.run, [*ray, "stop"], capture_output=True)
                return Engine(name, ["--on", "ray", *hosts], quiet | {"RAY_ADDRESS": "auto"})
            program = folder / "mpirun"
            program.write_text(f'#!/bin/sh\nexec {PROGRAMS[name][0]} "$@"\n')
            program.chmod(0o755)
            path = {"PATH": f"{folder}:{os.environ['PATH']}"}
            return Engine(name, ["--on", "mpirun", *hosts], quiet | path)

        def get(name: str) -> Engine:
            if why := missing(*PROGRAMS[name]):
                pytest.skip(why)
            if name == "ray" and find_spec("ray") is None:
                pytest.skip("there is no ray: run `pip install 'ashl[ray]'`")
            if name not in known:
                known[name] = make(name)
            return known[name]

        yield get


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The parameters of runs with runtime=local."""
    found = {}
    for topology, words in TOPOLOGIES.items():
        folder = tmp_path_factory.mktemp(topology)
        command = [sys.executable, "-m", "ashl.cli", "train", *words, *SHORT, "stop.steps=60"]
        own = ["cluster=real", "run.dir=run", "-q"]
        subprocess.run([*command, *own], cwd=folder, check=True, env=os.environ)
        found[topology] = summary(folder)["params_sha256"]
    return found


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run/summary.json").read_text())


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_bits_as_on_one_machine(
    name: str, topology: str, engines: Callable, local: dict[str, str], tmp_path: Path
) -> None:
    """Machines are unequal where the engine has kinds of them."""
    words = ["train", *TOPOLOGIES[topology], *SHORT, "stop.steps=60", "run.dir=run"]
    engines(name).run(tmp_path, words)
    assert summary(tmp_path)["params_sha256"] == local[topology]


SHELLS = ("sh", "dash", "bash", "env")


def process_of(variable: str, rank: int, folder: Path) -> psutil.Process | None:
    """The process of a rank that works in this folder."""
    for process in psutil.process_iter(["cwd", "cmdline"]):
        with suppress(psutil.Error):
            command = process.info["cmdline"] or [""]
            # a rank changes its title; a shell may be around it
            is_rank = "ashl" in " ".join(command[:4]) and Path(command[0]).name not in SHELLS
            if (
                is_rank
                and process.info["cwd"] == str(folder)
                and process.environ().get(variable) == str(rank)
            ):
                return process
    return None


def kill_worker(engine: Engine, folder: Path, words: Sequence[str]) -> str:
    """Run a job, kill worker 1 once a metric is recorded, and return the output of the job."""
    job = engine.start(folder, words)
    metrics = folder / "run/metrics.jsonl"
    end = time.monotonic() + 150
    while not (metrics.exists() and metrics.stat().st_size):
        assert job.poll() is None, job.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.1)
    process = process_of(RANKS[engine.name], 1, folder)
    assert process is not None
    process.kill()
    return job.communicate(timeout=200)[0]


LONG = [word for word in SHORT if not word.startswith("eval.")]
LONG += ["sync=ssp", "stop.seconds=8", "eval.every_s=1", "run.dir=run"]


@pytest.mark.parametrize("name", RESTART_DOMAINS)
def test_a_run_continues_without_a_killed_worker(
    name: str, engines: Callable, tmp_path: Path
) -> None:
    said = kill_worker(engines(name), tmp_path, ["train", *LONG])
    found = summary(tmp_path)
    assert found["status"] == "finished", said
    assert [failed["worker"] for failed in found["failed_workers"]] == [1]
    assert found["workers"][0]["steps"] > found["workers"][1]["steps"]


@pytest.mark.parametrize("name", RESTART_DOMAINS)
def test_a_killed_worker_is_started_again(name: str, engines: Callable, tmp_path: Path) -> None:
    engine = engines(name)
    engine = engine._replace(options=[*engine.options, "--restarts", "1"])
    words = [word.replace("stop.seconds=8", "stop.seconds=18") for word in LONG]
    said = kill_worker(engine, tmp_path, ["train", *words])
    found = summary(tmp_path)
    assert found["status"] == "finished", said
    (failed,) = found["failed_workers"]
    assert failed["worker"] == 1
    assert failed["rejoined_s"] is not None, said


def test_a_second_step_of_slurm_joins(engines: Callable, tmp_path: Path) -> None:
    """`ashl join` runs in a step of its own, in a job of one component."""
    engine = engines("slurm")._replace(options=["--on", "slurm", "--option=--wait"])
    words = [word.replace("stop.seconds=8", "stop.seconds=18") for word in LONG]
    job = engine.start(tmp_path, ["train", *words])
    metrics = tmp_path / "run/metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.stat().st_size, 150)
    process = process_of(RANKS["slurm"], 1, tmp_path)
    assert process is not None
    number = process.environ()["SLURM_JOB_ID"]
    process.kill()
    wait_for(lambda: " failed: " in (tmp_path / "run/controller.log").read_text(), 60)
    command = ["srun", f"--jobid={number}", "--overlap", "-N1", "-n1"]
    command += [sys.executable, "-m", "ashl.cli", "join", "run"]
    subprocess.run(command, cwd=tmp_path, env=engine.env, check=True, timeout=120)
    job.communicate(timeout=100)
    (failed,) = summary(tmp_path)["failed_workers"]
    assert failed["rejoined_s"] is not None


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_checkpoint_is_resumed(name: str, engines: Callable, tmp_path: Path) -> None:
    words = [*TOPOLOGIES["server"], *SHORT, "run.checkpoint_s=0.3", "run.dir=run"]
    engines(name).run(tmp_path, ["train", *words, "stop.seconds=2"])
    before = summary(tmp_path)["time_s"]
    engines(name).run(tmp_path, ["train", "--resume", "run", "stop.seconds=3"])
    assert summary(tmp_path)["time_s"] > before + 0.5


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_sweep(name: str, engines: Callable, tmp_path: Path) -> None:
    grid = ["sync=bsp,ssp", *SHORT, "stop.steps=60", "run.dir=grid"]
    engines(name).run(tmp_path, ["sweep", *grid])
    found = [json.loads(path.read_text()) for path in tmp_path.glob("grid/*/summary.json")]
    assert [run["status"] for run in found] == ["finished"] * 2


def test_slurm_by_hand(engines: Callable, local: dict[str, str], tmp_path: Path) -> None:
    """A step has heterogeneous components, and the nodes' names have no address in DNS."""
    env = engines("slurm").env
    words = [sys.executable, "-m", "ashl.cli", "train", *TOPOLOGIES["server"], *SHORT]
    words += ["stop.steps=60", "run.dir=run", "runtime=torchrun", "cluster=real", "-q"]
    command = ["srun", "-C", "fast", "-n2", *words, ":", "-C", "slow", "-n1", *words]
    subprocess.run(command, cwd=tmp_path, env=env, check=True, timeout=200)
    assert summary(tmp_path)["params_sha256"] == local["server"]


# --- sweeps in a queue, by submitit

QUEUED = ["--launcher", "submitit_slurm", "launcher.timeout_min=10", "-q"]
VIRTUAL = ["runtime=sim", "model.hidden=[4]", "eval.every_commits=40", "tracking=none"]


def start_sweep(engine: Engine, folder: Path, words: Sequence[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ashl.cli", "sweep", *words, *VIRTUAL, *QUEUED]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=engine.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def in_queue(engine: Engine) -> list[str]:
    """Return the name and the id of each job in the queue."""
    command = ["squeue", "-h", "-r", "-o", "%j %A"]
    return subprocess.run(
        command, env=engine.env, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def ended_runs(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in folder.glob("*/summary.json")]


def test_a_sweep_is_one_array(engines: Callable, tmp_path: Path) -> None:
    engine = engines("slurm")
    grid = ["sync=bsp,asp", "seed=0,1", "stop.epochs=2", "run.dir=grid", "--jobs", "2"]
    check(start_sweep(engine, tmp_path, grid), tmp_path)
    assert [run["status"] for run in ended_runs(tmp_path / "grid")] == ["finished"] * 4
    assert not list(tmp_path.glob("grid/launcher-*"))
    wait_for(lambda: not in_queue(engine), 60)  # Slurm takes a moment to complete a job


def test_an_interrupt_empties_the_queue(engines: Callable, tmp_path: Path) -> None:
    engine = engines("slurm")
    grid = ["sync=bsp", "seed=0,1,2,3", "stop.epochs=2000", "run.dir=grid", "--jobs", "2"]
    sweep = start_sweep(engine, tmp_path, grid)
    wait_for(lambda: len(list(tmp_path.glob("grid/*/metrics.jsonl"))) >= 2, 150)
    sweep.send_signal(signal.SIGINT)
    sweep.communicate(timeout=60)
    assert sweep.returncode == 130
    assert {run["status"] for run in ended_runs(tmp_path / "grid")} == {"interrupted"}
    wait_for(lambda: not in_queue(engine), 60)


def test_a_requeued_job_resumes(engines: Callable, tmp_path: Path) -> None:
    """Slurm sends submitit's signal before the time limit, and requeues the job."""
    engine = engines("slurm")
    words = ["sync=bsp", "stop.epochs=200", "run.checkpoint_s=20"]
    sweep = start_sweep(engine, tmp_path, [*words, "run.dir=grid"])
    wait_for(lambda: list(tmp_path.glob("grid/*/checkpoint/*/manifest.json")), 150)
    (job,) = in_queue(engine)
    subprocess.run(["scancel", "--signal=USR2", job.split()[1]], env=engine.env, check=True)
    check(sweep, tmp_path)
    whole = [sys.executable, "-m", "ashl.cli", "train", *words, *VIRTUAL, "run.dir=run", "-q"]
    subprocess.run(whole, cwd=tmp_path, env=engine.env, check=True)
    (run,) = ended_runs(tmp_path / "grid")
    assert run["params_sha256"] == summary(tmp_path)["params_sha256"]
