"""Start by torchrun: an agent per host starts its ranks, and restarts all at a failure."""

from collections.abc import Mapping

from ashl.errors import UsageError
from ashl.launch.job import RANK, Launch, Task
from ashl.launch.membership import JobMembership, read_local_rank, read_place, read_port

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def tasks(launch: Launch) -> list[Task]:
    """Return the agent of each host; PET_MASTER_ADDR and PET_MASTER_PORT tell it the master."""
    shares = launch.hosts
    found = []
    for node, share in enumerate(shares):
        place = [f"--nnodes={len(shares)}", f"--node-rank={node}"]
        place += [f"--nproc-per-node={len(share.ranks)}", *launch.options]
        # torchrun starts a module by `-m`
        argv = (launch.python, "-m", "torch.distributed.run", *place, *RANK[1:], *launch.argv)
        found.append(Task(share.machine, share.ranks.start, argv, {}))
    return found


def read(env: Mapping[str, str]) -> JobMembership | None:
    """Return the job that torchrun, or a user by hand, describes; None if there is none.

    Raises: UsageError if the variables contradict each other or name no master.
    """
    if "RANK" not in env:
        return None
    rank, size = read_place(env, "torchrun", "RANK", "WORLD_SIZE")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not env.get(name):
            raise UsageError(
                f"RANK is set and {name} is not; set it to the address of the process of rank 0, or"
                " unset RANK and WORLD_SIZE if this process is not part of a job"
            )
    return JobMembership(
        rank,
        size,
        env["MASTER_ADDR"],
        read_port(env),
        read_local_rank(env, "LOCAL_RANK"),
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=env.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )
