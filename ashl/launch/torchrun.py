"""Start by torchrun: an agent per host starts its ranks, and restarts all at a failure."""

from ashl.launch.environment import LOCAL
from ashl.launch.job import RANK, HostRanks, Launch, Machine, Task


def tasks(launch: Launch) -> list[Task]:
    """Return the agent of each host, by default of this one. PET_MASTER_ADDR and PET_MASTER_PORT
    tell it the master.
    """
    shares = launch.hosts or (HostRanks(Machine(LOCAL, launch.size), range(launch.size)),)
    found = []
    for node, share in enumerate(shares):
        place = [f"--nnodes={len(shares)}", f"--node-rank={node}"]
        place += [f"--nproc-per-node={len(share.ranks)}", *launch.options]
        # torchrun starts a module by `-m`
        argv = (launch.python, "-m", "torch.distributed.run", *place, *RANK[1:], *launch.argv)
        # Python then looks for no module in the present folder, which may hold a folder `ashl`.
        found.append(Task(share.machine, share.ranks.start, argv, {"PYTHONSAFEPATH": "1"}))
    return found
