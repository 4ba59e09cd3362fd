"""What torchrun, mpirun or srun say, in the environment, of the job that they have started this
process for.
"""

import os
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ashl.errors import UsageError

PORT = 29500  # torch's own, where the starter has no opinion
SLURM_PORTS = range(12000, 32000)  # below those that the system hands out by itself


class JobMembership(NamedTuple):
    """This process's place in a job that someone else has started."""

    rank: int  # among the job's processes; which rank of the plan it plays is said in `placing`
    world_size: int
    host: str  # of the master, which keeps the job's store
    port: int
    local_rank: int | None  # among the processes of its machine
    agent_store: bool = (
        False  # whether the starter keeps the store; else the process of rank 0 does
    )
    attempt: str = "0"  # torchrun starts a job anew that has failed, with the same store


class Launcher(NamedTuple):
    """The names under which a starter says who is who."""

    name: str
    rank: str
    size: tuple[str, ...]  # the first that is there
    local_rank: str


LAUNCHERS = (
    Launcher("torchrun", "RANK", ("WORLD_SIZE",), "LOCAL_RANK"),
    Launcher(
        "mpirun", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), "OMPI_COMM_WORLD_LOCAL_RANK"
    ),
    Launcher("srun", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "SLURM_LOCALID"),
)


def read_membership(env: Mapping[str, str] | None = None) -> JobMembership | None:
    """The job that this process is part of; None where there is none, or only this process in it.

    Raises UsageError where what the environment says makes no sense.
    """
    env = os.environ if env is None else env
    launcher = next((launcher for launcher in LAUNCHERS if launcher.rank in env), None)
    if launcher is None:
        if "WORLD_SIZE" in env:
            raise UsageError(
                "WORLD_SIZE is set and RANK is not; set both, as torchrun does, or unset WORLD_SIZE"
            )
        return None
    if launcher.name == "srun" and env.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in env:
        return None  # the script that sbatch runs, which is no task of a job step
    sizes = [name for name in launcher.size if name in env]
    if not sizes and launcher.name == "srun":
        return None
    if not sizes:
        raise UsageError(
            f"{launcher.rank} is set and {launcher.size[0]} is not; set both, as {launcher.name}"
            " does"
        )
    rank, world_size = read_natural(env, launcher.rank), read_natural(env, sizes[0])
    if rank >= world_size:
        raise UsageError(
            f"{launcher.rank}={rank}, but {sizes[0]}={world_size} counts ranks from 0 to"
            f" {world_size - 1}"
        )
    local_rank = read_natural(env, launcher.local_rank) if launcher.local_rank in env else None
    if launcher.name == "torchrun":
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not env.get(name):
                raise UsageError(
                    f"RANK is set and {name} is not; it says where the process of rank 0 is to be"
                    " found; unset RANK and WORLD_SIZE where this process is no part of a job"
                )
        agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
        return JobMembership(
            rank, world_size, env["MASTER_ADDR"], master_port(env), local_rank, agent, attempt
        )
    if world_size == 1:
        return None
    host, port = env.get("MASTER_ADDR"), master_port(env)
    if launcher.name == "srun":
        host, port = (
            host or first_host(env),
            master_port(env) if "MASTER_PORT" in env else slurm_port(env),
        )
    if not host:
        raise UsageError(
            f"{launcher.name} does not say where the process of rank 0 is; give every process its"
            " address, as in `mpirun -x MASTER_ADDR=10.0.0.1 -x MASTER_PORT=29500`"
        )
    return JobMembership(rank, world_size, host, port, local_rank)


def clear_launcher_env() -> None:
    """Take out of the environment what a starter says: this process is part of no job."""
    for launcher in LAUNCHERS:
        for name in (launcher.rank, *launcher.size, launcher.local_rank):
            os.environ.pop(name, None)


def read_natural(env: Mapping[str, str], name: str) -> int:
    """Raises UsageError where it is no whole number from 0 up."""
    if not re.fullmatch(r"[0-9]{1,9}", env[name].strip()):
        raise UsageError(
            f"{name}={env[name]!r} in the environment, where a whole number from 0 up is expected"
        )
    return int(env[name])


def master_port(env: Mapping[str, str]) -> int:
    port = read_natural(env, "MASTER_PORT") if "MASTER_PORT" in env else PORT
    if not 0 < port < 65536:
        raise UsageError(f"MASTER_PORT={port} is no port; take one from 1024 to 65535")
    return port


def slurm_port(env: Mapping[str, str]) -> int:
    """One that the steps of a job, and jobs that follow one another, do not share."""
    if "SLURM_JOB_ID" not in env:
        raise UsageError(
            "srun does not say SLURM_JOB_ID, from which a port would follow; set MASTER_PORT"
        )
    step = env.get("SLURM_STEP_ID", "0")
    return SLURM_PORTS[
        (read_natural(env, "SLURM_JOB_ID") + 7 * int(step if step.isdecimal() else 0))
        % len(SLURM_PORTS)
    ]


def first_host(env: Mapping[str, str]) -> str:
    """The node of rank 0. Raises UsageError where the list of nodes is missing or makes no
    sense.
    """
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
            "srun does not say SLURM_JOB_NODELIST, in which the first node is the master; set"
            " MASTER_ADDR"
        )
    try:
        return next(expand_nodelist(env[name]))
    except ValueError as error:
        raise UsageError(
            f"{name}={env[name]!r} is no list of nodes: {error}; set MASTER_ADDR"
        ) from error


def expand_nodelist(nodes: str) -> Iterator[str]:
    """The nodes of a list as Slurm writes it: `a,b[1-3,07]c` is a, b1c, b2c, b3c and b07c. Raises
    ValueError.
    """
    word = r"[\w.-]+(\[[\d,-]+\][\w.-]*)*"
    if not re.fullmatch(rf"{word}(,{word})*", nodes):
        raise ValueError("names and ranges in brackets are expected")
    for word in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        yield from expand_name(word)


def expand_name(word: str) -> Iterator[str]:
    """One name, or those that its first range in brackets makes of it, and so on."""
    before, bracket, rest = word.partition("[")
    if not bracket:
        yield word
        return
    ranges, _, after = rest.partition("]")
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        if not first or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise ValueError(f"the range {part!r} is none")
        for number in range(int(first), int(last or first) + 1):
            for tail in expand_name(after):
                yield f"{before}{number:0{len(first)}d}{tail}"
