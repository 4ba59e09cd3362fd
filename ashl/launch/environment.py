"""Find the job that an engine describes in the environment of this process."""

import os
import socket
from collections.abc import Mapping

from ashl.errors import UsageError
from ashl.launch import kubernetes, mpirun, slurm, torchrun
from ashl.launch.membership import JobMembership

# A job of mpirun may be inside one of Slurm; Kubeflow's variables may be beside torchrun's.
ENGINES = (torchrun, mpirun, slurm, kubernetes)


def read_membership(env: Mapping[str, str] | None = None) -> JobMembership | None:
    """Return the job that this process is part of; None if there is none, or if it has one process
    (mpirun, srun, Kubernetes).

    Raises: UsageError if the environment is contradictory.
    """
    env = os.environ if env is None else env
    for engine in ENGINES:
        if (found := engine.read(env)) is not None:
            return found
    if "WORLD_SIZE" in env and "JOB_COMPLETION_INDEX" not in env:
        raise UsageError(
            "WORLD_SIZE is set and RANK is not; set both, as torchrun does, or unset WORLD_SIZE"
        )
    return None


def clear_launcher_env() -> None:
    """Remove the engines' variables from the environment, so that this process is in no job."""
    for engine in ENGINES:
        for name in engine.VARIABLES:
            os.environ.pop(name, None)


def resolve(host: str, port: int) -> str | None:
    """Return a name or address of a host that resolves here; None if there is none.

    Slurm's controller knows addresses of its nodes, which need no name in DNS.
    """
    for find in (str, slurm.node_address):
        name = find(host)
        try:
            if name is not None and socket.getaddrinfo(name, port):
                return name
        except OSError:
            continue
    return None
