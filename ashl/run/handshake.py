"""How the processes of a job meet, check that they fit together, and agree on which process plays
which rank.

Each process publishes a `Hello` in the job's store and waits for those of all others. A mismatch
(versions, configurations, a process without work) ends all processes with the same sentence and
exit code. Every hello is validated before it is used. The order in which nodes were numbered does
not decide the ranks: `assign_ranks` does.
"""

import hashlib
import json
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter, ValidationError

from ashl import __version__
from ashl.errors import AshlError, DataMissingError, UsageError, plain
from ashl.learn.fingerprint import Fingerprint, differing
from ashl.plan.profile import Profile
from ashl.run.authenticated_store import AuthenticatedStore
from ashl.run.control_channel import POLL_S
from ashl.run.launcher_env import JobMembership
from ashl.run.membership_listener import AwakeTime
from ashl.runtime.machine import machine
from ashl.runtime.records import Text

OWN = {"interface", "device", "threads", "share_gpu", "root"}  # what machines may have each its own
SAME = "same"  # the key of what has to be the same everywhere
RECORDING = {
    "run",
    "tracking",
    "sweep",
    "profile",
}  # of files, what is in them counts: the plan has it
VERSIONS = ("ashl", "torch", "python")
ERRORS = {kind.exit_code: kind for kind in (AshlError, UsageError, DataMissingError)}


class Hello(NamedTuple):
    """What a process says of itself. `rank` and `local_rank` are those that its starter gave it."""

    rank: int
    host: Text
    machine: Text  # alike where a loopback is shared
    local_rank: int | None
    ashl: Text
    torch: Text
    python: Text
    plan: Text = ""  # a hash of all that has to be alike
    device: Text = "cpu"
    gpu: Text | None = None  # which of the machine's, where it takes one
    address: Text | None = None  # of the interface that it would take
    interface_by: Text | None = None  # the key or variable that names this interface
    error: Text | None = None  # why it does not take part
    exit_code: int = 0


def make_hello(job: JobMembership, **known: Any) -> Hello:
    """This process's own; `known` are the fields that it cannot find out here."""
    version = torch.__version__.partition("+")[0]  # builds for CPUs and for CUDA go together
    python = ".".join(platform.python_version_tuple()[:2])
    return Hello(
        job.rank, platform.node(), machine(), job.local_rank, __version__, version, python, **known
    )


def hello_key(rank: int) -> str:
    return f"hello/{rank}"


def publish_hello(store: AuthenticatedStore, own: Hello, plan: str = "") -> None:
    """Say it. Raises AshlError where somebody has said it in this process's name."""
    text = json.dumps(own._asdict())
    store.set(f"plan/{own.rank}", plan)
    there = store.compare_set(hello_key(own.rank), "", text).decode(errors="replace")
    if there != text:
        host = parse_hello(there, own.rank).host
        raise AshlError(
            f"a process of rank {own.rank} is there already, on {host}; give every process a "
            "rank of its own, and every job a MASTER_PORT of its own"
        )


def parse_hello(text: str | bytes, rank: int) -> Hello:
    """What the process of that rank said. Raises AshlError where it is nothing that one of ours
    would say.
    """
    try:
        greeting = hello_adapter().validate_json(text, strict=True)
        if greeting.rank != rank:
            raise ValueError(f"it is said by rank {greeting.rank}")
        return greeting
    except ValueError as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else None
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first else str(error)
        raise AshlError(
            f"what rank {rank} said of itself makes no sense ({why}); is another program using the"
            " job's port?"
        ) from None


@cache
def hello_adapter() -> TypeAdapter[Hello]:
    return TypeAdapter(Hello)


def gather_hellos(
    store: AuthenticatedStore, job: JobMembership, timeout_s: float
) -> tuple[Hello, ...]:
    """Everybody's, by rank. Raises AshlError, the same in all processes, where they do not fit
    together, and where not all have come in time, naming them.
    """
    hellos: dict[int, Hello] = {}
    awake = AwakeTime()
    while len(hellos) < job.world_size:
        late = [rank for rank in range(job.world_size) if rank not in hellos]
        for rank in late:
            if store.check([hello_key(rank)]):
                hellos[rank] = parse_hello(store.get(hello_key(rank)), rank)
        check_hellos(store, hellos)
        if len(hellos) < job.world_size:
            if awake.passed_s() > timeout_s:
                raise AshlError(explain_absence(hellos, job.world_size, timeout_s))
            time.sleep(POLL_S)
    return tuple(hellos[rank] for rank in range(job.world_size))


def explain_absence(hellos: Mapping[int, Hello], world_size: int, timeout_s: float) -> str:
    """Who did not come, and who did."""
    late = [rank for rank in range(world_size) if rank not in hellos]
    present = ", ".join(f"rank {rank} on {hellos[rank].host}" for rank in sorted(hellos))
    who = f"rank {late[0]}" if len(late) == 1 else f"ranks {', '.join(map(str, late))}"
    alone = (
        ", or unset RANK and WORLD_SIZE where this process is no part of a job"
        if len(hellos) == 1
        else ""
    )
    return (
        f"{who} of the {world_size} processes did not come within {timeout_s:g} s"
        f" (runtime.heartbeat_timeout_s); there {'is' if len(hellos) == 1 else 'are'} {present};"
        f" start all of them, each with a rank of its own{alone}"
    )


def check_hellos(store: AuthenticatedStore, hellos: Mapping[int, Hello]) -> None:
    """Raises AshlError where one of these cannot run, or not with that of rank 0."""
    for rank, greeting in sorted(hellos.items()):
        if greeting.error is not None:
            raise ERRORS.get(greeting.exit_code, AshlError)(
                f"rank {rank} on {greeting.host}: {greeting.error}"
            )
    if 0 not in hellos:
        return
    first = hellos[0]
    for rank, greeting in sorted(hellos.items()):
        pairs = [
            (f"{name} {getattr(greeting, name)}", f"{name} {getattr(first, name)}")
            for name in VERSIONS
        ]
        own, other = next((pair for pair in pairs if pair[0] != pair[1]), (None, None))
        fix = "install the same on both"
        if own is None and greeting.plan != first.plan:
            own, other = first_difference(
                *(store.get(f"plan/{of}").decode(errors="replace") for of in (rank, 0))
            )
            fix = "give every process the same overrides"
        if own is not None:
            raise UsageError(
                f"rank {rank} on {greeting.host} has {own} and rank 0 on {first.host} has {other};"
                f" {fix}"
            )


def publish_fingerprint(store: AuthenticatedStore, found: Fingerprint) -> None:
    """Say what the process that keeps the records has made of model and data."""
    store.set(SAME, json.dumps(found))


def compare_fingerprint(
    store: AuthenticatedStore, own: Fingerprint, over: Callable[[], bool]
) -> None:
    """Wait for that, unless the run is `over`. Raises AshlError if this process has made something
    else.
    """
    while not store.check([SAME]):
        if over():
            return
        time.sleep(POLL_S)
    if (name := differing(own, json.loads(store.get(SAME)))) is not None:
        raise AshlError(
            f"{name} differ between this process and the one that keeps the records; draw from the"
            " global generators of torch, numpy or random, which every process seeds from the"
            " run's seed, or seed your own generator, and read the same files everywhere"
        )


def settings_in_common(config: Mapping[str, Any], plan: str) -> str:
    """What has to be alike in all processes, as text: the configuration and the plan that was made
    of it, without what is the business of the process that records, or what machines may have each
    its own.
    """
    chosen = {key: value for key, value in config.items() if key not in RECORDING}
    chosen["run"] = {
        "checkpoint_s": config["run"]["checkpoint_s"]
    }  # ranks keep their parts of those
    return json.dumps(without_machine_settings({**chosen, "plan": json.loads(plan)}))


def without_machine_settings(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key: without_machine_settings(part) for key, part in value.items() if key not in OWN
        }
    return value


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def first_difference(own: str, other: str) -> tuple[str, str]:
    """The first value in which two such texts differ, as each has it: what was chosen before what
    follows from it.
    """
    try:
        ours, theirs = (dict(flatten_values(json.loads(text))) for text in (own, other))
    except (ValueError, RecursionError):
        return "another configuration", "its own"
    for name in sorted(
        {*ours, *theirs}, key=lambda name: (name[:8] != "choices.", name[:5] == "plan.", name)
    ):
        if ours.get(name) != theirs.get(name):
            values = (
                f"{name.removeprefix('choices.')}={of.get(name, 'null')}" for of in (ours, theirs)
            )
            first, second = (plain(text[:200]) for text in values)
            return first, second
    return "another configuration", "its own"


def flatten_values(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """The values in a document, each with the way to it."""
    if isinstance(value, Mapping):
        for part, inner in value.items():
            yield from flatten_values(inner, f"{name}.{part}" if name else part)
    elif (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and any(isinstance(v, Mapping) for v in value)
    ):
        for index, inner in enumerate(value):
            yield from flatten_values(inner, f"{name}.{index}")
    else:
        yield name, value if isinstance(value, str) else json.dumps(value)


class PlacementRequest(NamedTuple):
    """What is known of it before the processes have met: where the workers are, and the server, and
    what says so.
    """

    hosts: tuple[str, ...] | None = None  # `host` or `host:local_rank` of each worker
    hosts_by: str = "cluster.hosts"
    server: str | None = None


def assign_ranks(
    hellos: Sequence[Hello], num_workers: int, num_ranks: int, request: PlacementRequest
) -> tuple[int, ...]:
    """The rank in the job of each rank of the plan. Raises UsageError where what is wanted is not
    there.

    The workers of `wanted.hosts` take the processes of these hosts, else they keep the order of
    processes; a server, or coordinator, is at `wanted.server`, else on the process that is left, or
    the last one of the node of process 0. In a job of as many processes as workers it is process 0
    that starts it, beside its own worker.
    """
    if shares_a_node(hellos, num_ranks):
        if request.server is not None and 0 not in processes_on(
            hellos, request.server, "cluster.server_host"
        ):
            raise UsageError(
                f"cluster.server_host names {request.server}: in a job of as many processes as"
                f" workers the server shares the node of process 0, {hellos[0].host}; start one"
                f" process more, on {request.server}"
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
    """Return True if the job has no process for the server, or coordinator, so that process 0
    starts it as a child.
    """
    return num_ranks == len(hellos) + 1


def processes_on(hellos: Sequence[Hello], name: str, by: str) -> list[int]:
    """The processes that a name stands for. Raises UsageError where there are none, or not on one
    machine.
    """
    host, colon, local = name.partition(":")
    found = [
        peer for peer in hellos if host in (peer.host, peer.host.partition(".")[0], peer.address)
    ]
    if not found:
        there = Counter(peer.host for peer in hellos)
        listed = ", ".join(
            f"{other} ({count} process{'es' if count > 1 else ''})"
            for other, count in there.items()
        )
        raise UsageError(
            f"{by} names {host}, and no process of the job is there; there are: {listed}"
        )
    if len({peer.machine for peer in found}) > 1:
        known = ", ".join(dict.fromkeys(peer.address or "?" for peer in found))
        raise UsageError(
            f"{by} names {host}, and several machines call themselves so; take their addresses:"
            f" {known}"
        )
    if not colon:
        return [peer.rank for peer in found]
    exact = [peer.rank for index, peer in enumerate(found) if str(local_rank(peer, index)) == local]
    if not exact:
        raise UsageError(
            f"{by} names {name}, and {host} has {len(found)}"
            f" process{'es' if len(found) > 1 else ''}"
        )
    return exact


def local_rank(peer: Hello, index: int) -> int:
    """As its starter says, else by its place among the processes of its machine."""
    return index if peer.local_rank is None else peer.local_rank


def explain_shortage(
    named: dict[int, str], by: str, rank: int, num_workers: int, there: int
) -> str:
    """Why the last process of a host is gone."""
    name, host = named[rank], named[rank].partition(":")[0]
    if ":" in name:
        return f"{by} names {name}, and it is named already; name each process once"
    workers = sum(
        other.partition(":")[0] == host for who, other in named.items() if who < num_workers
    )
    server = (
        " beside the server"
        if num_workers in named and named[num_workers].partition(":")[0] == host
        else ""
    )
    fix = "start more, or name other hosts"
    if by.startswith("profile="):
        fix = "profile again with `ashl profile` and the server where it is to be, or drop profile="
    return (
        f"{by} names {name} for {workers} worker{'s' if workers > 1 else ''}{server}, and the job"
        f" has {there} process{'es' if there > 1 else ''} there; {fix}"
    )


def placement_by_profile(
    profile: Profile | None, hellos: Sequence[Hello], request: PlacementRequest, path: str
) -> PlacementRequest:
    """The same, with the workers where a profile has measured them, if it says where and these
    hosts are in the job.
    """
    there = {peer.host for peer in hellos}
    hosts = [worker.host for worker in profile.workers if worker.host in there] if profile else []
    if profile is None or request.hosts is not None or len(hosts) < profile.num_workers:
        return request
    return request._replace(hosts=tuple(map(str, hosts)), hosts_by=f"profile={path}")


def check_profile(
    profile: Profile | None, hellos: Sequence[Hello], processes: Sequence[int], path: str
) -> None:
    """Raises UsageError where a worker is on a host of the job that is not the one where the
    profile has measured it: what is known are another machine's costs.
    """
    there = {peer.host for peer in hellos}
    for rank, worker in enumerate(profile.workers if profile else ()):
        host = hellos[processes[rank]].host
        if worker.host in there and worker.host != host:
            raise UsageError(
                f"profile={path} has measured worker {rank} on {worker.host}, and here it is on"
                f" {host}; profile again with `ashl profile`, or drop profile="
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
                f"ranks {other} and {process} on {peer.host} both take its GPU {peer.gpu}; give"
                " each process a GPU of its own by LOCAL_RANK, or say runtime.share_gpu=true or"
                " runtime.device=cpu"
            )


def server_note(
    who: str,
    host: str | None,
    request: PlacementRequest,
    profile: Profile | None,
    path: str,
    shared: bool = False,
) -> str:
    """On which host, where that is known, the server or coordinator is, and what has decided it.
    `shared`: whether it is there beside a worker, without a process of its own in the job.
    """
    if shared:
        why = "the node of process 0, which starts it, as the job has as many processes as workers"
    elif request.server is not None:
        why = "as cluster.server_host says"
    elif request.hosts is not None:
        why = f"the process that {request.hosts_by} leaves"
    else:
        why = (
            "the node of process 0; no profile says which link is best, and cluster.server_host"
            " chooses another"
        )
    text = f"{who} runs on {why}" if host is None else f"{who} runs on host {host}: {why}"
    better = profile.better_host if profile is not None and request.server is None else None
    if better is None:
        return text
    return (
        f"{text}; by profile={path} the link of {better} is no worse, perhaps better: a profile"
        f" with cluster.server_host={better} would tell"
    )
