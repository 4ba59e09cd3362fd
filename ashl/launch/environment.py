"""Find the job that an engine describes in the environment of this process.

Each engine has a row of `ENGINES` with the names of its variables. The address of rank 0 is
MASTER_ADDR, unless the engine has a name of its own for it. Without it, Slurm's first node counts,
or this machine if all processes are on it.
"""

import os
import re
import socket
import subprocess
from collections.abc import Mapping
from ipaddress import ip_address
from typing import NamedTuple

from ashl.errors import UsageError

SECRET = "ASHL_JOB_SECRET"  # environment variable with the secret of a job
LOCAL = "localhost"
PORTS = range(12000, 32000)  # below the ports that Linux assigns itself
PORT = 29500  # torch's default, if the engine sets no port
RANK_OFFSET = "ASHL_RANK_OFFSET"  # the first rank of a ReplicatedJob of Kubernetes
NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
SCONTROL_S = 10.0  # longest wait in seconds for Slurm's controller


class JobMembership(NamedTuple):
    """This process's place in a job of another launcher."""

    rank: int  # among the job's processes; `ashl.run.handshake.assign_ranks` sets that of the plan
    world_size: int
    host: str  # host of the master
    port: int
    local_rank: int | None  # among the processes of its machine
    # True if torchrun's agent serves a store at this address
    agent_store: bool = False
    attempt: str = "0"  # number of restarts by torchrun


class Engine(NamedTuple):
    """The environment variables by which an engine describes a job to its processes."""

    rank: str
    sizes: tuple[str, ...]  # number of processes; the first one that is set counts
    local_rank: str = ""
    local_size: str = ""
    host: str = "MASTER_ADDR"
    port: str = "MASTER_PORT"


TORCHRUN = Engine("RANK", ("WORLD_SIZE",), "LOCAL_RANK")
# A job of mpirun may be inside one of Slurm; Kubeflow's variables may be beside torchrun's.
ENGINES = (
    TORCHRUN,
    Engine(
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Engine("PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    Engine("SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "SLURM_LOCALID"),
    Engine("PET_NODE_RANK", ("PET_NNODES",), host="PET_MASTER_ADDR", port="PET_MASTER_PORT"),
    Engine("JOB_COMPLETION_INDEX", ("WORLD_SIZE",)),
)


def read_membership(env: Mapping[str, str] | None = None) -> JobMembership | None:
    """Return the job that this process is part of; None if there is none, or if it has one process
    (mpirun, srun, Kubernetes).

    Raises: UsageError if the environment is contradictory or names no master.
    """
    env = os.environ if env is None else env
    for engine in ENGINES:
        size_name = next((name for name in engine.sizes if name in env), None)
        if engine.rank not in env or size_name is None or is_batch_script(engine, env):
            continue
        rank, size = read_natural(env, engine.rank), read_natural(env, size_name)
        if engine.rank == "JOB_COMPLETION_INDEX":
            rank += int(env.get(RANK_OFFSET, "0"))
        if rank >= size:
            raise UsageError(
                f"{engine.rank}: rank {rank}, but {size_name}={size} counts ranks from 0 to"
                f" {size - 1}"
            )
        if size == 1 and engine != TORCHRUN:
            return None
        ranks_here = env.get("PET_NPROC_PER_NODE", "1")
        if engine.rank == "PET_NODE_RANK" and ranks_here not in ("1", "auto", "cpu", "gpu"):
            raise UsageError(
                f"PET_NPROC_PER_NODE={ranks_here}: this pod has several ranks; start them by"
                " torchrun, or set it to 1"
            )
        return JobMembership(
            rank,
            size,
            host_of_rank_0(engine, size, env),
            read_port(engine, env),
            read_natural(env, engine.local_rank) if engine.local_rank in env else None,
            agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=env.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )
    (size_name,) = TORCHRUN.sizes
    for name, other in ((TORCHRUN.rank, size_name), (size_name, TORCHRUN.rank)):
        if name in env and other not in env:
            raise UsageError(
                f"{name} is set and {other} is not; set both, as torchrun does, or unset {name}"
            )
    return None


def is_batch_script(engine: Engine, env: Mapping[str, str]) -> bool:
    """Return True if this is the script that sbatch runs, which is no task of a job step."""
    return (
        engine.rank == "SLURM_PROCID"
        and env.get("ENVIRONMENT") == "BATCH"
        and "SLURM_STEP_ID" not in env
    )


def read_natural(env: Mapping[str, str], name: str) -> int:
    """Return a variable as a whole number from 0 up. Raises UsageError if it is not one."""
    if not re.fullmatch(r"[0-9]{1,9}", env[name].strip()):
        raise UsageError(
            f"{name}={env[name]!r} in the environment, where a whole number from 0 up is expected"
        )
    return int(env[name])


def read_port(engine: Engine, env: Mapping[str, str]) -> int:
    """Return the port of the master. Raises UsageError if it is no port.

    By default Slurm's port follows from the numbers of the job and its step, so that two of them do
    not share it.
    """
    if engine.port in env:
        port = read_natural(env, engine.port)
        if not 0 < port < 65536:
            raise UsageError(f"{engine.port}={port} is no port; take one from 1024 to 65535")
        return port
    if engine.rank != "SLURM_PROCID":
        return PORT
    # a component of a heterogeneous job has a number of its own
    job = "SLURM_HET_JOB_ID" if "SLURM_HET_JOB_ID" in env else "SLURM_JOB_ID"
    if job not in env:
        raise UsageError(f"srun does not say {job}, which decides the port; set {engine.port}")
    step = env.get("SLURM_STEP_ID", "0")
    number = read_natural(env, job) + 7 * int(step if step.isdecimal() else 0)
    return PORTS[number % len(PORTS)]


def host_of_rank_0(engine: Engine, size: int, env: Mapping[str, str]) -> str:
    """Return the host of rank 0. Raises UsageError if nothing names it."""
    if env.get(engine.host):
        return env[engine.host]
    if engine.local_size and env.get(engine.local_size) == str(size):
        return "127.0.0.1"
    if engine != TORCHRUN and (name := next((name for name in NODE_LISTS if env.get(name)), None)):
        return first_host(name, env[name])
    raise UsageError(
        f"{engine.rank} is set, and nothing says where the process of rank 0 is; set {engine.host}"
        f" and {engine.port} for every process, as in `mpirun -x {engine.host}=10.0.0.1`, or unset"
        f" {engine.rank} if this process is not part of a job"
    )


def first_host(name: str, nodes: str) -> str:
    """Return the first node of Slurm's list in the variable `name`; of `a[07-09,12]b,c` it is a07b.

    Raises: UsageError if the list is invalid.
    """
    found = re.fullmatch(r"([\w.-]+(?:\[\d[\d,-]*\][\w.-]*)*)(?:,.*)?", nodes)
    if not found:
        raise UsageError(
            f"{name}={nodes!r} is no list of nodes: names and ranges in brackets are expected;"
            " set MASTER_ADDR"
        )
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", found[1])


def clear_launcher_env() -> None:
    """Remove the engines' variables from the environment, so that this process is in no job."""
    for engine in ENGINES:
        for name in (engine.rank, *engine.sizes, engine.local_rank):
            os.environ.pop(name, None)


def resolve(host: str) -> str | None:
    """Return a name or address of a host that resolves here; None if there is none.

    Slurm's controller knows addresses of its nodes, which need no name in DNS.
    """
    for find in (str, node_address):
        name = find(host)
        try:
            if name is not None and socket.getaddrinfo(name, None):
                return name
        except OSError:
            continue
    return None


def node_address(name: str) -> str | None:
    """Return the address of a node by Slurm's configuration; None without Slurm or such a node."""
    ask = ["scontrol", "show", "node", name, "--oneliner"]
    try:
        answer = subprocess.run(
            ask, capture_output=True, text=True, timeout=SCONTROL_S, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"\bNodeAddr=(\S+)", answer)
    return found[1] if found else None


def is_loopback(host: str) -> bool:
    """Return True for a loopback address and for the name `localhost`."""
    try:
        return ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == LOCAL
