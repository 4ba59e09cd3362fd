"""The handshake of a run's processes: each asks process 0 for a place, which is the rank that it
runs with its settings.

A process describes itself by a `Hello` in its request (`request_place`), and waits for the answer.
Process 0 keeps the requests (`PlaceRequests`) until the run begins. It checks that they fit
together, and decides which process runs which rank. If they do not fit together (versions,
configurations, a process without work), all processes of the job end with the same sentence and
exit code. From the begin of the run on the controller answers: a process that comes later, for
example by `ashl join`, gets the place of a failed worker, or is refused alone.

Two numberings meet here. A process has a rank in the job, from its launcher; `assign_ranks` gives
it a rank of the plan. Nodes are told apart by `Hello.node_id`, because several may have one host
name.
"""

import json
import platform
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch

from ashl import __version__
from ashl.config.flat import flat_config, flat_items, setting_text
from ashl.errors import AshlError, DataMissingError, UsageError, to_one_line
from ashl.plan.plan import Plan
from ashl.plan.profile import Profile
from ashl.planning.compatibility import pluralize
from ashl.run.authenticated_store import StoreClient, StoreServer
from ashl.run.control_channel import PATIENCE_S, POLL_S, AwakeTime
from ashl.run.interface import Interface, replace_loopback
from ashl.run.rank import RankSettings, role_name
from ashl.runtime.records import Text, validate
from ashl.runtime.rendezvous import network_id

JOINS = -1  # rank of a process that no launcher has given a rank
RETRY_S = 0.3  # seconds from an answer that gives no place to the next request
NODE_KEYS = {"interface", "device", "threads", "share_gpu", "root"}  # keys that may differ by node
# Groups that only the process of rank 0 reads. The plan holds all that a profile decides.
RECORDING_GROUPS = {"run", "tracking", "sweep", "profile"}
VERSIONS = ("ashl", "torch", "python")  # in the order of `Hello.versions`
# the error that a refused process raises, by the exit code in the answer
ERROR_BY_EXIT_CODE = {kind.exit_code: kind for kind in (AshlError, UsageError, DataMissingError)}


class Hello(NamedTuple):
    """A process's description of itself."""

    rank: int  # from its launcher; `JOINS` for a process of `ashl join`
    host: Text  # name of its node
    # identical for processes that share a loopback interface; a container counts as a node
    node_id: Text
    versions: tuple[Text, Text, Text]
    local_rank: int | None = None  # from its launcher
    worker: int | None = None  # the worker that `ashl join` asks for; None = any failed one
    settings: Mapping[str, Any] = {}  # settings that must be identical in all processes
    device: Text = "cpu"
    gpu: Text | None = None  # the GPU of its node that it uses
    address: Text | None = None  # address of the interface that it uses
    error: Text | None = None  # why it cannot take part
    exit_code: int = 0


class Place(NamedTuple):
    """The settings of a rank of the run, or the reason why a process gets none."""

    settings: RankSettings = RankSettings(0)
    remote_addresses: tuple[Text, ...] = ()  # addresses of processes on other nodes
    failure: Text = (
        ""  # how the worker's earlier incarnation failed, for example "ended by SIGKILL"
    )
    plan: str = ""  # for a process that has not composed the configuration
    refused: Text | None = None
    exit_code: int = 1  # exit code of a refused process
    may_change: bool = False  # True if a later request may be admitted

    def settings_here(self, device: str, chosen: Interface | None) -> RankSettings:
        """Return the settings in a process with this device and network interface."""
        return self.settings._replace(
            device=self.settings.device or device,
            interface=replace_loopback(chosen, self.remote_addresses),
        )


def make_hello(rank: int = JOINS, **known: Any) -> Hello:
    """Return the hello of this process; `known` are the fields that the caller knows."""
    of_torch = torch.__version__.partition("+")[0]  # builds for CPUs and CUDA are compatible
    versions = __version__, of_torch, ".".join(platform.python_version_tuple()[:2])
    return Hello(rank, platform.node(), network_id(), versions, **known)


class PlaceRequest(NamedTuple):
    """A process's request for a place."""

    hello: Hello
    answer: Future[Place]
    thread: int  # identifier of the thread that serves the connection of the process


class PlaceRequests:
    """The requests of processes for a place in a run, each until it is answered.

    Threads: the thread of a connection adds a request and waits for the answer, which the main
    thread gives.
    """

    def __init__(self, store: StoreServer, own: Hello) -> None:
        """Receive requests from now on; `own` is the hello of process 0."""
        self.own = own
        self.pending: deque[PlaceRequest] = deque()
        # by process of a job: its place, until the process has it
        self.places: dict[int, Place] = {}
        self.workers: dict[int, int] = {}  # by process of a job: its rank of the plan
        store.handlers["join"] = self._receive

    def _receive(self, fields: object) -> Place | None:
        """Return the answer to a request. If there is none after `PATIENCE_S`, withdraw the request
        and return None.
        """
        try:
            hello = validate(Hello, fields, "the description of a process")
        except AshlError as error:  # for example of another version of ashl
            return Place(refused=str(error))
        answer = Future[Place]()
        self.pending.append(PlaceRequest(hello, answer, threading.get_ident()))
        try:
            return answer.result(PATIENCE_S)
        except TimeoutError:
            # it is too late to withdraw a request that the controller is answering
            return None if answer.cancel() else answer.result()

    def gather(self, world_size: int, timeout_s: float) -> tuple[Hello, ...]:
        """Wait for the requests of all other processes; return all hellos by rank.

        Raises: AshlError if they do not fit together, or if one is missing after `timeout_s`.
        """
        hellos = {0: self.own}
        awake = AwakeTime()
        while awake.passed_s() < timeout_s:
            for hello, *_ in [*self.pending]:
                if 0 <= hello.rank < world_size and hello.rank not in hellos:
                    check_hello(hello, self.own)
                    hellos[hello.rank] = hello
            if len(hellos) == world_size:
                return tuple(hellos[rank] for rank in range(world_size))
            time.sleep(POLL_S)
        late = [str(rank) for rank in range(world_size) if rank not in hellos]
        raise AshlError(
            f"rank{'s' * (len(late) > 1)} {', '.join(late)} of the {world_size} processes did not"
            f" join within {timeout_s:g} s (runtime.wait_timeout_s); start all of them, each"
            " with a rank of its own, or unset RANK and WORLD_SIZE if this process is not part of a"
            " job"
        )

    def refuse_all(self, error: AshlError, count: int) -> None:
        """Answer the requests of `count` processes by this error, those that arrive within
        `PATIENCE_S`.
        """
        refusal = Place(refused=to_one_line(str(error)), exit_code=error.exit_code)
        until_s = time.monotonic() + PATIENCE_S
        while count and time.monotonic() < until_s:
            while self.pending:
                answer = self.pending.popleft().answer
                if answer.set_running_or_notify_cancel():
                    answer.set_result(refusal)
                    count -= 1
            time.sleep(RETRY_S)  # the threads of the connections send the answers meanwhile


def request_place(store: StoreClient, own: Hello) -> Place | None:
    """Ask process 0 for a place, and return its answer; None if it has not answered within
    `PATIENCE_S`: the run has not begun, or evaluates. Raises RuntimeError if the store fails.
    """
    answer = store.call("join", own)
    return None if answer is None else validate(Place, answer, "the answer of the run")


def check_hello(hello: Hello, first: Hello) -> None:
    """Raise AshlError if a process cannot take part, or differs from that of rank 0 (`first`)."""
    who = "this process" if hello.rank == JOINS else f"rank {hello.rank} on {hello.host}"
    if hello.error is not None:
        raise ERROR_BY_EXIT_CODE.get(hello.exit_code, AshlError)(f"{who}: {hello.error}")
    for name, own, other in zip(VERSIONS, hello.versions, first.versions, strict=True):
        if own != other:
            raise UsageError(
                f"{who} has {name} {own} and rank 0 on {first.host} has {name} {other}; install the"
                " same on both"
            )
    ours, theirs = hello.settings, first.settings
    # in this order: chosen options, then their parameters, then the plan, which follows from both
    for key in () if hello.rank == JOINS else {**ours, **theirs}:
        if ours.get(key) != theirs.get(key):
            own, other = (
                to_one_line(f"{key}={setting_text(settings.get(key))}"[:200])
                for settings in (ours, theirs)
            )
            raise UsageError(
                f"{who} has {own} and rank 0 on {first.host} has {other}; give every process the"
                " same overrides"
            )


def settings_in_common(config: Mapping[str, Any], plan: str) -> dict[str, Any]:
    """Return the settings that must be identical in all processes, by their keys: those of the
    configuration and of the plan, without the groups of `RECORDING_GROUPS` (except
    `run.checkpoint_s`) and the keys of `NODE_KEYS`.
    """
    chosen = {key: value for key, value in config.items() if key not in RECORDING_GROUPS}
    # ranks save their parts of checkpoints
    chosen["run"] = {"checkpoint_s": config["run"]["checkpoint_s"]}
    document = without_node_settings({**chosen, "plan": None})
    planned = without_node_settings({"plan": json.loads(plan)})
    settings = {**flat_config(document), **dict(flat_items(planned))}
    return json.loads(json.dumps(settings))  # as it arrives at process 0


def without_node_settings(value: Any) -> Any:
    """Return a document without the keys of `NODE_KEYS`, at every depth."""
    if isinstance(value, Mapping):
        return {
            key: without_node_settings(part) for key, part in value.items() if key not in NODE_KEYS
        }
    return value


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
        first_node = hellos[0].node_id
        near = [process for process in unassigned if hellos[process].node_id == first_node]
        taken[num_workers] = (near or unassigned)[-1]
        unassigned.remove(taken[num_workers])
    remaining = iter(unassigned)
    return tuple(taken[rank] if rank in taken else next(remaining) for rank in range(num_ranks))


def find_processes(hellos: Sequence[Hello], name: str) -> list[int]:
    """Find the processes on the host `name`, or the one process `host:local_rank`.

    Returns: their ranks in the job.
    Raises: UsageError if there is none, or if several nodes have this name.
    """
    host, colon, local = name.partition(":")
    found = [
        peer for peer in hellos if host in (peer.host, peer.host.partition(".")[0], peer.address)
    ]
    if len({peer.node_id for peer in found}) > 1:
        known = ", ".join(dict.fromkeys(peer.address or "?" for peer in found))
        raise UsageError(
            f"cluster.hosts names {host}, which is the name of several nodes; use their"
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
    host is in the job: the profile would predict another node's costs.
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
        if (other := taken.setdefault((peer.node_id, peer.gpu), process)) != process:
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
