"""Which process of a job plays which rank of the plan: the order in which nodes were numbered decides nothing."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ashl.errors import UsageError
from ashl.plan.profile import Profile
from ashl.run.handshake import Hello


class PlacementRequest(NamedTuple):
    """What is known of it before the processes have met: where the workers are, and the server, and what says so."""

    hosts: tuple[str, ...] | None = None  # `host` or `host:local_rank` of each worker
    hosts_by: str = "cluster.hosts"
    server: str | None = None


def assign_ranks(
    hellos: Sequence[Hello], num_workers: int, num_ranks: int, request: PlacementRequest
) -> tuple[int, ...]:
    """The rank in the job of each rank of the plan. Raises UsageError where what is wanted is not there.

    The workers of `wanted.hosts` take the processes of these hosts, else they keep the order of processes; a server, or
    coordinator, is at `wanted.server`, else on the process that is left, or the last one of the node of process 0. In a
    job of as many processes as workers it is process 0 that starts it, beside its own worker.
    """
    if shares_a_node(hellos, num_ranks):
        if request.server is not None and 0 not in processes_on(hellos, request.server, "cluster.server_host"):
            raise UsageError(
                f"cluster.server_host names {request.server}: in a job of as many processes as workers the server "
                f"shares the node of process 0, {hellos[0].host}; start one process more, on {request.server}"
            )
        return *assign_ranks(hellos, num_workers, num_workers, request._replace(server=None)), 0
    named = dict(enumerate(request.hosts or ()))
    by = dict.fromkeys(named, request.hosts_by)
    if num_ranks > num_workers and request.server is not None:
        named[num_workers], by[num_workers] = request.server, "cluster.server_host"
    taken: dict[int, int] = {}
    for rank in sorted(named, key=lambda rank: (":" not in named[rank], rank < num_workers)):
        found = processes_on(hellos, named[rank], by[rank])
        free = [process for process in found if process not in taken.values()]
        if not free:
            raise UsageError(explain_shortage(named, by[rank], rank, num_workers, len(found)))
        taken[rank] = free[0] if rank < num_workers else free[-1]
    left = [process for process in range(len(hellos)) if process not in taken.values()]
    if num_ranks > num_workers not in taken:
        beside = [process for process in left if hellos[process].machine == hellos[0].machine]
        taken[num_workers] = left.pop(left.index((beside or left)[-1]))
    remaining = iter(left)
    return tuple(taken[rank] if rank in taken else next(remaining) for rank in range(num_ranks))


def shares_a_node(hellos: Sequence[Hello], num_ranks: int) -> bool:
    """Return True if the job has no process for the server, or coordinator, so that process 0 starts it as a child."""
    return num_ranks == len(hellos) + 1


def processes_on(hellos: Sequence[Hello], name: str, by: str) -> list[int]:
    """The processes that a name stands for. Raises UsageError where there are none, or not on one machine."""
    host, colon, local = name.partition(":")
    found = [peer for peer in hellos if host in (peer.host, peer.host.partition(".")[0], peer.address)]
    if not found:
        there = Counter(peer.host for peer in hellos)
        listed = ", ".join(f"{other} ({count} process{'es' if count > 1 else ''})" for other, count in there.items())
        raise UsageError(f"{by} names {host}, and no process of the job is there; there are: {listed}")
    if len({peer.machine for peer in found}) > 1:
        known = ", ".join(dict.fromkeys(peer.address or "?" for peer in found))
        raise UsageError(f"{by} names {host}, and several machines call themselves so; take their addresses: {known}")
    if not colon:
        return [peer.rank for peer in found]
    exact = [peer.rank for index, peer in enumerate(found) if str(local_rank(peer, index)) == local]
    if not exact:
        raise UsageError(f"{by} names {name}, and {host} has {len(found)} process{'es' if len(found) > 1 else ''}")
    return exact


def local_rank(peer: Hello, index: int) -> int:
    """As its starter says, else by its place among the processes of its machine."""
    return index if peer.local_rank is None else peer.local_rank


def explain_shortage(named: dict[int, str], by: str, rank: int, num_workers: int, there: int) -> str:
    """Why the last process of a host is gone."""
    name, host = named[rank], named[rank].partition(":")[0]
    if ":" in name:
        return f"{by} names {name}, and it is named already; name each process once"
    workers = sum(other.partition(":")[0] == host for who, other in named.items() if who < num_workers)
    server = " beside the server" if num_workers in named and named[num_workers].partition(":")[0] == host else ""
    fix = "start more, or name other hosts"
    if by.startswith("profile="):
        fix = "profile again with `ashl profile` and the server where it is to be, or drop profile="
    return (
        f"{by} names {name} for {workers} worker{'s' if workers > 1 else ''}{server}, and the job has {there} "
        f"process{'es' if there > 1 else ''} there; {fix}"
    )


def placement_by_profile(
    profile: Profile | None, hellos: Sequence[Hello], request: PlacementRequest, path: str
) -> PlacementRequest:
    """The same, with the workers where a profile has measured them, if it says where and these hosts are in the job."""
    there = {peer.host for peer in hellos}
    hosts = [worker.host for worker in profile.workers if worker.host in there] if profile else []
    if profile is None or request.hosts is not None or len(hosts) < profile.num_workers:
        return request
    return request._replace(hosts=tuple(map(str, hosts)), hosts_by=f"profile={path}")


def check_profile(profile: Profile | None, hellos: Sequence[Hello], processes: Sequence[int], path: str) -> None:
    """Raises UsageError where a worker is on a host of the job that is not the one where the profile has measured it:
    what is known are another machine's costs."""
    there = {peer.host for peer in hellos}
    for rank, worker in enumerate(profile.workers if profile else ()):
        host = hellos[processes[rank]].host
        if worker.host in there and worker.host != host:
            raise UsageError(
                f"profile={path} has measured worker {rank} on {worker.host}, and here it is on {host}; profile again "
                "with `ashl profile`, or drop profile="
            )


def check_gpus(hellos: Sequence[Hello], workers: Sequence[int], share: bool) -> None:
    """Raises UsageError where two workers take one GPU and nobody has said that they may."""
    taken: dict[tuple[str, str], int] = {}
    for process in workers:
        peer = hellos[process]
        if peer.gpu is None or share:
            continue
        if (other := taken.setdefault((peer.machine, peer.gpu), process)) != process:
            raise UsageError(
                f"ranks {other} and {process} on {peer.host} both take its GPU {peer.gpu}; give each process a GPU of "
                "its own by LOCAL_RANK, or say runtime.share_gpu=true or runtime.device=cpu"
            )


def server_note(
    who: str, host: str | None, request: PlacementRequest, profile: Profile | None, path: str, shared: bool = False
) -> str:
    """On which host, where that is known, the server or coordinator is, and what has decided it. `shared`: whether it
    is there beside a worker, without a process of its own in the job."""
    if shared:
        why = "the node of process 0, which starts it, as the job has as many processes as workers"
    elif request.server is not None:
        why = "as cluster.server_host says"
    elif request.hosts is not None:
        why = f"the process that {request.hosts_by} leaves"
    else:
        why = "the node of process 0; no profile says which link is best, and cluster.server_host chooses another"
    text = f"{who} runs on {why}" if host is None else f"{who} runs on host {host}: {why}"
    better = profile.better_host if profile is not None and request.server is None else None
    if better is None:
        return text
    return (
        f"{text}; by profile={path} the link of {better} is no worse, perhaps better: a profile with "
        f"cluster.server_host={better} would tell"
    )
