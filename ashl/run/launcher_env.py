"""The job that torchrun, mpirun or srun describe in the environment of this process."""

import os
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ashl.errors import UsageError

PORT = 29500  # torch's default, if the launcher sets no port
SLURM_PORTS = range(12000, 32000)  # below the ports that Linux assigns itself


class JobMembership(NamedTuple):
    """This process's place in a job of another launcher."""

    rank: int  # among the job's processes; `ashl.run.handshake.assign_ranks` sets that of the plan
    world_size: int
    host: str  # host of the master, which serves the job's store
    port: int
    local_rank: int | None  # among the processes of its machine
    # True if the launcher serves the store; else the process of rank 0 does
    agent_store: bool = False
    attempt: str = "0"  # number of restarts by torchrun, which keeps the store


class Launcher(NamedTuple):
    """The environment variables of a launcher."""

    name: str
    rank: str
    size: tuple[str, ...]  # the first one that is set
    local_rank: str


LAUNCHERS = (
    Launcher("torchrun", "RANK", ("WORLD_SIZE",), "LOCAL_RANK"),
    Launcher(
        "mpirun", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), "OMPI_COMM_WORLD_LOCAL_RANK"
    ),
    Launcher("srun", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "SLURM_LOCALID"),
)


def read_membership(env: Mapping[str, str] | None = None) -> JobMembership | None:
    """Return the job that this process is part of; None if there is none, or if it has one process
    (mpirun, srun).

    Raises: UsageError if the environment is contradictory.
    """
    env = os.environ if env is None else env
    launcher = next((launcher for launcher in LAUNCHERS if launcher.rank in env), None)
    if launcher is None:
        if "WORLD_SIZE" in env:
            raise UsageError(
                "WORLD_SIZE is set and RANK is not; set both, as torchrun does, or unset WORLD_SIZE"
            )
        return None
    # the script that sbatch runs is no task of a job step
    is_script = env.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in env
    sizes = [name for name in launcher.size if name in env]
    if launcher.name == "srun" and (is_script or not sizes):
        return None
    if not sizes:
        raise UsageError(
            f"{launcher.rank} is set and {launcher.size[0]} is not; set both, as {launcher.name}"
            " does"
        )
    rank = read_natural(env, launcher.rank)
    world_size = read_natural(env, sizes[0])
    if rank >= world_size:
        raise UsageError(
            f"{launcher.rank}={rank}, but {sizes[0]}={world_size} counts ranks from 0 to"
            f" {world_size - 1}"
        )
    local_rank = read_natural(env, launcher.local_rank) if launcher.local_rank in env else None
    if launcher.name == "torchrun":
        return read_torchrun(env, rank, world_size, local_rank)
    if world_size == 1:
        return None
    host, port = read_master(env, launcher)
    return JobMembership(rank, world_size, host, port, local_rank)


def read_torchrun(
    env: Mapping[str, str], rank: int, world_size: int, local_rank: int | None
) -> JobMembership:
    """Return the job of torchrun. Raises UsageError without the master's address and port."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not env.get(name):
            raise UsageError(
                f"RANK is set and {name} is not; set it to the address of the process of rank 0, or"
                " unset RANK and WORLD_SIZE if this process is not part of a job"
            )
    return JobMembership(
        rank,
        world_size,
        env["MASTER_ADDR"],
        master_port(env),
        local_rank,
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=env.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def read_master(env: Mapping[str, str], launcher: Launcher) -> tuple[str, int]:
    """Return host and port of the master of mpirun or srun. Raises UsageError without a host."""
    host = env.get("MASTER_ADDR")
    if launcher.name == "srun":
        host = host or first_host(env)
        return host, master_port(env) if "MASTER_PORT" in env else slurm_port(env)
    port = master_port(env)
    if not host:
        raise UsageError(
            f"{launcher.name} does not say where the process of rank 0 is; give every process its"
            " address, for example `mpirun -x MASTER_ADDR=10.0.0.1 -x MASTER_PORT=29500`"
        )
    return host, port


def clear_launcher_env() -> None:
    """Remove the launchers' variables from the environment, so that this process is in no job."""
    for launcher in LAUNCHERS:
        for name in (launcher.rank, *launcher.size, launcher.local_rank):
            os.environ.pop(name, None)


def read_natural(env: Mapping[str, str], name: str) -> int:
    """Return a variable as a whole number from 0 up. Raises UsageError if it is not one."""
    if not re.fullmatch(r"[0-9]{1,9}", env[name].strip()):
        raise UsageError(
            f"{name}={env[name]!r} in the environment, where a whole number from 0 up is expected"
        )
    return int(env[name])


def master_port(env: Mapping[str, str]) -> int:
    """Return MASTER_PORT, or torch's default. Raises UsageError if it is no port."""
    port = read_natural(env, "MASTER_PORT") if "MASTER_PORT" in env else PORT
    if not 0 < port < 65536:
        raise UsageError(f"MASTER_PORT={port} is no port; take one from 1024 to 65535")
    return port


def slurm_port(env: Mapping[str, str]) -> int:
    """Return a port from the number of the job and its step, so that two of them do not share it.

    Raises: UsageError without SLURM_JOB_ID.
    """
    if "SLURM_JOB_ID" not in env:
        raise UsageError("srun does not say SLURM_JOB_ID, which decides the port; set MASTER_PORT")
    step = env.get("SLURM_STEP_ID", "0")
    return SLURM_PORTS[
        (read_natural(env, "SLURM_JOB_ID") + 7 * int(step if step.isdecimal() else 0))
        % len(SLURM_PORTS)
    ]


def first_host(env: Mapping[str, str]) -> str:
    """Return the node of rank 0. Raises UsageError if the list of nodes is missing or invalid."""
    name = next(
        (
            name
            for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
            if env.get(name)
        ),
        "",
    )
    if not name:
        raise UsageError(
            "srun does not say SLURM_JOB_NODELIST, in which the master is first; set MASTER_ADDR"
        )
    try:
        return next(expand_nodelist(env[name]))
    except ValueError as error:
        raise UsageError(
            f"{name}={env[name]!r} is no list of nodes: {error}; set MASTER_ADDR"
        ) from error


def expand_nodelist(nodes: str) -> Iterator[str]:
    """Yield the nodes of Slurm's list: `a,b[1-3,07]c` is a, b1c, b2c, b3c and b07c.

    Raises: ValueError if the list is invalid.
    """
    word = r"[\w.-]+(\[[\d,-]+\][\w.-]*)*"
    if not re.fullmatch(rf"{word}(,{word})*", nodes):
        raise ValueError("names and ranges in brackets are expected")
    for word in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        yield from expand_name(word)


def expand_name(word: str) -> Iterator[str]:
    """Yield the names that the ranges in brackets make of a name."""
    before, bracket, rest = word.partition("[")
    if not bracket:
        yield word
        return
    ranges, _, after = rest.partition("]")
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        if not first or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise ValueError(f"the range {part!r} is invalid")
        for number in range(int(first), int(last or first) + 1):
            for tail in expand_name(after):
                yield f"{before}{number:0{len(first)}d}{tail}"
