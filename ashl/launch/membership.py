"""A process's place in a job of another launcher, and how to read it from the environment."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from ashl.errors import UsageError

PORT = 29500  # torch's default, if the engine sets no port


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


def read_natural(env: Mapping[str, str], name: str) -> int:
    """Return a variable as a whole number from 0 up. Raises UsageError if it is not one."""
    if not re.fullmatch(r"[0-9]{1,9}", env[name].strip()):
        raise UsageError(
            f"{name}={env[name]!r} in the environment, where a whole number from 0 up is expected"
        )
    return int(env[name])


def read_place(env: Mapping[str, str], engine: str, rank: str, size: str) -> tuple[int, int]:
    """Return rank and number of processes from these variables of an engine.

    Raises: UsageError if one is missing or they contradict each other.
    """
    if size not in env:
        raise UsageError(f"{rank} is set and {size} is not; set both, as {engine} does")
    number, count = read_natural(env, rank), read_natural(env, size)
    if number >= count:
        raise UsageError(f"{rank}={number}, but {size}={count} counts ranks from 0 to {count - 1}")
    return number, count


def read_local_rank(env: Mapping[str, str], name: str) -> int | None:
    return read_natural(env, name) if name in env else None


def read_port(env: Mapping[str, str], name: str = "MASTER_PORT", default: int = PORT) -> int:
    """Return the port in a variable, or the default. Raises UsageError if it is no port."""
    port = read_natural(env, name) if name in env else default
    if not 0 < port < 65536:
        raise UsageError(f"{name}={port} is no port; take one from 1024 to 65535")
    return port
