"""The handshake of a job's processes: process 0 checks that they fit together, and decides which
process runs which rank.

Each process publishes a `Hello` in the job's store. A mismatch (versions, configurations, a process
without work) ends all processes with the same sentence and exit code. Every hello is validated
before it is used. Two numberings meet here: a process has a rank in the job, from its launcher;
`assign_ranks` gives it a rank of the plan.
"""

import json
import platform
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ashl import __version__
from ashl.config.flat import flat_config, flat_items, setting_text
from ashl.errors import AshlError, DataMissingError, UsageError, to_one_line
from ashl.launch.environment import JobMembership
from ashl.plan.plan import Plan
from ashl.plan.profile import Profile
from ashl.planning.compatibility import pluralize
from ashl.run.authenticated_store import AuthenticatedStore
from ashl.run.control_channel import POLL_S
from ashl.run.rank import role_name
from ashl.runtime.records import Text, parse_json, validate
from ashl.runtime.rendezvous import network_id

NODE_KEYS = {"interface", "device", "threads", "share_gpu", "root"}  # keys that may differ by node
# Groups that only the process of rank 0 reads. The plan holds all that a profile decides.
RECORDING_GROUPS = {"run", "tracking", "sweep", "profile"}
VERSIONS = ("ashl", "torch", "python")
ERRORS = {kind.exit_code: kind for kind in (AshlError, UsageError, DataMissingError)}


class Hello(NamedTuple):
    """A process's description of itself."""

    rank: int  # from its launcher
    host: Text
    machine: Text  # identical for processes that share a loopback
    local_rank: int | None  # from its launcher
    ashl: Text
    torch: Text
    python: Text
    settings: str = ""  # the settings that must be identical in all processes, as one text
    device: Text = "cpu"
    gpu: Text | None = None  # the GPU of the machine that it uses
    address: Text | None = None  # address of the interface that it uses
    interface_by: Text | None = None  # the key or variable that names this interface
    error: Text | None = None  # why it cannot take part
    exit_code: int = 0

    def dumps(self) -> str:
        return json.dumps(self._asdict())


def make_hello(job: JobMembership, **known: Any) -> Hello:
    """Return the hello of this process; `known` are the fields that the caller knows."""
    return Hello(job.rank, platform.node(), network_id(), job.local_rank, *versions(), **known)


def versions() -> tuple[str, str, str]:
    """Return the versions of ashl, torch and Python that the processes of a run must share."""
    of_torch = torch.__version__.partition("+")[0]  # builds for CPUs and CUDA are compatible
    return __version__, of_torch, ".".join(platform.python_version_tuple()[:2])


def hello_key(rank: int) -> str:
    """Return the key of a process's hello in the store."""
    return f"hello/{rank}"


def parse_hello(text: str | bytes, rank: int) -> Hello:
    """Return the hello of the process with this rank. Raises AshlError if it is invalid."""
    try:
        greeting = validate(Hello, parse_json(text), "it")
        if greeting.rank != rank:
            raise AshlError(f"it is of rank {greeting.rank}")
        return greeting
    except AshlError as error:
        raise AshlError(
            f"the hello of rank {rank} is invalid ({error}); is another program using the job's"
            " port?"
        ) from None


def gather_hellos(
    store: AuthenticatedStore, own: Hello, world_size: int, timeout_s: float
) -> tuple[Hello, ...]:
    """Wait at process 0 for the hellos of all other processes, and return all hellos by rank.

    Args: own, the hello of process 0.
    Raises: AshlError if they do not fit together; AshlError that names the missing ones if a hello
    is missing after `timeout_s`.
    """
    hellos = {0: own}
    # passes are counted and not seconds, in which this process may have been stopped
    for _ in range(1 + round(timeout_s / POLL_S)):
        for rank in range(1, world_size):
            if rank not in hellos and store.check([hello_key(rank)]):
                hellos[rank] = parse_hello(store.get(hello_key(rank)), rank)
                check_hello(hellos[rank], own)
        if len(hellos) == world_size:
            return tuple(hellos[rank] for rank in range(world_size))
        time.sleep(POLL_S)
    raise AshlError(explain_absence(hellos, world_size, timeout_s))


def explain_absence(hellos: Mapping[int, Hello], world_size: int, timeout_s: float) -> str:
    """Return the sentence that names the missing processes and the present ones."""
    late = [rank for rank in range(world_size) if rank not in hellos]
    present = ", ".join(f"rank {rank} on {hellos[rank].host}" for rank in sorted(hellos))
    who = f"rank {late[0]}" if len(late) == 1 else f"ranks {', '.join(map(str, late))}"
    alone = (
        ", or unset RANK and WORLD_SIZE if this process is not part of a job"
        if len(hellos) == 1
        else ""
    )
    return (
        f"{who} of the {world_size} processes did not join within {timeout_s:g} s"
        f" (runtime.heartbeat_timeout_s); there {'is' if len(hellos) == 1 else 'are'} {present};"
        f" start all of them, each with a rank of its own{alone}"
    )


def check_hello(hello: Hello, first: Hello) -> None:
    """Raise AshlError if a process cannot take part, or differs from that of rank 0 (`first`)."""
    who = f"rank {hello.rank} on {hello.host}"
    if hello.error is not None:
        raise ERRORS.get(hello.exit_code, AshlError)(f"{who}: {hello.error}")
    for name in VERSIONS:
        own, other = getattr(hello, name), getattr(first, name)
        if own != other:
            raise UsageError(
                f"{who} has {name} {own} and rank 0 on {first.host} has {name} {other}; install the"
                " same on both"
            )
    if hello.settings == first.settings:
        return
    if (found := first_difference(hello.settings, first.settings)) is not None:
        own, other = found
        raise UsageError(
            f"{who} has {own} and rank 0 on {first.host} has {other}; give every process the same"
            " overrides"
        )


def settings_in_common(config: Mapping[str, Any], plan: str) -> str:
    """Return as JSON the settings that must be identical in all processes: the configuration and
    the plan, without the groups of `RECORDING_GROUPS` and the keys of `NODE_KEYS`.
    """
    chosen = {key: value for key, value in config.items() if key not in RECORDING_GROUPS}
    # ranks save their parts of checkpoints
    chosen["run"] = {"checkpoint_s": config["run"]["checkpoint_s"]}
    document = without_machine_settings({**chosen, "plan": None})
    planned = without_machine_settings({"plan": json.loads(plan)})
    return json.dumps({**flat_config(document), **dict(flat_items(planned))})


def without_machine_settings(value: Any) -> Any:
    """Return a document without the keys of `NODE_KEYS`, at every depth."""
    if isinstance(value, Mapping):
        return {
            key: without_machine_settings(part)
            for key, part in value.items()
            if key not in NODE_KEYS
        }
    return value


def first_difference(own: str, other: str) -> tuple[str, str] | None:
    """Return the first setting in which two texts of `settings_in_common` differ, with its value in
    each; None if only the order of keys differs.

    Order: chosen options, then their parameters, then the plan, which follows from both.
    """
    ours, theirs = json.loads(own), json.loads(other)
    key = next((key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)), None)
    if key is None:
        return None
    values = (f"{key}={setting_text(settings.get(key))}" for settings in (ours, theirs))
    first, second = (to_one_line(text[:200]) for text in values)
    return first, second


def assign_ranks(
    hellos: Sequence[Hello], num_workers: int, num_ranks: int, hosts: Sequence[str]
) -> tuple[int, ...]:
    """Return the process (rank in the job) for each rank of the plan.

    Workers take processes on `hosts`, in this order; the others keep the order of processes. A
    server, or coordinator, takes the last remaining process on the node of process 0, else the last
    remaining one.
    Raises: UsageError if the job has no such processes.
    """
    taken: dict[int, int] = {}
    # names of one process come first
    for worker in sorted(range(len(hosts)), key=lambda worker: ":" not in hosts[worker]):
        found = find_processes(hellos, hosts[worker])
        free = [process for process in found if process not in taken.values()]
        if not free:
            raise UsageError(
                f"cluster.hosts names {hosts[worker]} once more than the job has processes there"
                f" ({len(found)}); start more, or name other hosts"
            )
        taken[worker] = free[0]
    unassigned = [process for process in range(len(hellos)) if process not in taken.values()]
    if num_ranks > num_workers:
        first_node = hellos[0].machine
        near = [process for process in unassigned if hellos[process].machine == first_node]
        taken[num_workers] = (near or unassigned)[-1]
        unassigned.remove(taken[num_workers])
    remaining = iter(unassigned)
    return tuple(taken[rank] if rank in taken else next(remaining) for rank in range(num_ranks))


def find_processes(hellos: Sequence[Hello], name: str) -> list[int]:
    """Find the processes on the host `name`, or the one process `host:local_rank`.

    Raises: UsageError if there is none, or if several machines have this name.
    """
    host, colon, local = name.partition(":")
    found = [
        peer for peer in hellos if host in (peer.host, peer.host.partition(".")[0], peer.address)
    ]
    if len({peer.machine for peer in found}) > 1:
        known = ", ".join(dict.fromkeys(peer.address or "?" for peer in found))
        raise UsageError(
            f"cluster.hosts names {host}, which is the name of several machines; use their"
            f" addresses: {known}"
        )
    chosen = [
        peer.rank
        for index, peer in enumerate(found)
        if not colon or local == str(index if peer.local_rank is None else peer.local_rank)
    ]
    if not chosen:
        counts = Counter(peer.host for peer in hellos).items()
        there = ", ".join(
            f"{other} ({pluralize(n, 'process', 'processes')})" for other, n in counts
        )
        raise UsageError(
            f"cluster.hosts names {name}, and no process of the job is there; there are: {there}"
        )
    return chosen


def check_profile(
    profile: Profile | None, hellos: Sequence[Hello], processes: Sequence[int], path: str
) -> None:
    """Raise UsageError if a worker is on another host than where the profile measured it, and that
    host is in the job: the profile would predict another machine's costs.
    """
    if profile is None:
        return
    there = {peer.host for peer in hellos}
    measured = ",".join(str(worker.host) for worker in profile.workers)
    for rank, worker in enumerate(profile.workers):
        host = hellos[processes[rank]].host
        if worker.host in there and worker.host != host:
            raise UsageError(
                f"profile={path} has measured worker {rank} on {worker.host}, and here it is on"
                f" {host}; set cluster.hosts=[{measured}], or run `ashl profile` again"
            )


def check_gpus(hellos: Sequence[Hello], workers: Sequence[int], share: bool) -> None:
    """Raise UsageError if two workers use the same GPU and `share` is False."""
    taken: dict[tuple[str, str], int] = {}
    for process in workers:
        peer = hellos[process]
        if peer.gpu is None or share:
            continue
        if (other := taken.setdefault((peer.machine, peer.gpu), process)) != process:
            raise UsageError(
                f"ranks {other} and {process} on {peer.host} both take its GPU {peer.gpu}; give"
                " each process a GPU of its own by LOCAL_RANK, or set runtime.share_gpu=true or"
                " runtime.device=cpu"
            )


def server_note(plan: Plan, host: str) -> tuple[str, ...]:
    """Return a note about the number of workers and the host of the server or coordinator; none if
    the plan has no such rank.
    """
    if plan.num_ranks == plan.num_workers:
        return ()
    role = role_name(plan, plan.num_workers).partition(" (")[0].removeprefix("the ")
    return (
        f"the job is {pluralize(plan.num_workers, 'worker', 'workers')} and a {role}; the {role}"
        f" runs on host {host}",
    )
