"""How the processes of a job meet: each says in the job's store who it is, and all wait until everybody has come.

What does not fit together (versions, configurations, a process that has nothing to run) ends all of them at once, each
with the same sentence and exit code. What comes is checked before anything is made of it.
"""

import hashlib
import json
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter, ValidationError

from ashl import __version__
from ashl.errors import AshlError, DataMissingError, UsageError, plain
from ashl.learn.fingerprint import Fingerprint, differing
from ashl.run.authenticated_store import AuthenticatedStore
from ashl.run.control_channel import POLL_S
from ashl.run.launcher_env import JobMembership
from ashl.run.watchdog import AwakeTime
from ashl.runtime.machine import machine
from ashl.runtime.records import Text

OWN = {"interface", "device", "threads", "share_gpu", "root"}  # what machines may have each its own
SAME = "same"  # the key of what has to be the same everywhere
RECORDING = {"run", "tracking", "sweep", "profile"}  # of files, what is in them counts: the plan has it
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
    return Hello(job.rank, platform.node(), machine(), job.local_rank, __version__, version, python, **known)


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
    """What the process of that rank said. Raises AshlError where it is nothing that one of ours would say."""
    try:
        greeting = hello_adapter().validate_json(text, strict=True)
        if greeting.rank != rank:
            raise ValueError(f"it is said by rank {greeting.rank}")
        return greeting
    except ValueError as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else None
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first else str(error)
        raise AshlError(
            f"what rank {rank} said of itself makes no sense ({why}); is another program using the job's port?"
        ) from None


@cache
def hello_adapter() -> TypeAdapter[Hello]:
    return TypeAdapter(Hello)


def gather_hellos(store: AuthenticatedStore, job: JobMembership, timeout_s: float) -> tuple[Hello, ...]:
    """Everybody's, by rank. Raises AshlError, the same in all processes, where they do not fit together, and where not
    all have come in time, naming them."""
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
    alone = ", or unset RANK and WORLD_SIZE where this process is no part of a job" if len(hellos) == 1 else ""
    return (
        f"{who} of the {world_size} processes did not come within {timeout_s:g} s (runtime.heartbeat_timeout_s); there "
        f"{'is' if len(hellos) == 1 else 'are'} {present}; start all of them, each with a rank of its own{alone}"
    )


def check_hellos(store: AuthenticatedStore, hellos: Mapping[int, Hello]) -> None:
    """Raises AshlError where one of these cannot run, or not with that of rank 0."""
    for rank, greeting in sorted(hellos.items()):
        if greeting.error is not None:
            raise ERRORS.get(greeting.exit_code, AshlError)(f"rank {rank} on {greeting.host}: {greeting.error}")
    if 0 not in hellos:
        return
    first = hellos[0]
    for rank, greeting in sorted(hellos.items()):
        pairs = [(f"{name} {getattr(greeting, name)}", f"{name} {getattr(first, name)}") for name in VERSIONS]
        own, other = next((pair for pair in pairs if pair[0] != pair[1]), (None, None))
        fix = "install the same on both"
        if own is None and greeting.plan != first.plan:
            own, other = first_difference(*(store.get(f"plan/{of}").decode(errors="replace") for of in (rank, 0)))
            fix = "give every process the same overrides"
        if own is not None:
            raise UsageError(f"rank {rank} on {greeting.host} has {own} and rank 0 on {first.host} has {other}; {fix}")


def publish_fingerprint(store: AuthenticatedStore, found: Fingerprint) -> None:
    """Say what the process that keeps the records has made of model and data."""
    store.set(SAME, json.dumps(found))


def compare_fingerprint(store: AuthenticatedStore, own: Fingerprint, over: Callable[[], bool]) -> None:
    """Wait for that, unless the run is `over`. Raises AshlError if this process has made something else."""
    while not store.check([SAME]):
        if over():
            return
        time.sleep(POLL_S)
    if (name := differing(own, json.loads(store.get(SAME)))) is not None:
        raise AshlError(
            f"{name} differ between this process and the one that keeps the records; draw from the global generators "
            "of torch, numpy or random, which every process seeds from the run's seed, or seed your own generator, and "
            "read the same files everywhere"
        )


def settings_in_common(config: Mapping[str, Any], plan: str) -> str:
    """What has to be alike in all processes, as text: the configuration and the plan that was made of it, without what
    is the business of the process that records, or what machines may have each its own."""
    chosen = {key: value for key, value in config.items() if key not in RECORDING}
    chosen["run"] = {"checkpoint_s": config["run"]["checkpoint_s"]}  # ranks keep their parts of those
    return json.dumps(without_machine_settings({**chosen, "plan": json.loads(plan)}))


def without_machine_settings(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: without_machine_settings(part) for key, part in value.items() if key not in OWN}
    return value


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def first_difference(own: str, other: str) -> tuple[str, str]:
    """The first value in which two such texts differ, as each has it: what was chosen before what follows from it."""
    try:
        ours, theirs = (dict(flatten_values(json.loads(text))) for text in (own, other))
    except (ValueError, RecursionError):
        return "another configuration", "its own"
    for name in sorted({*ours, *theirs}, key=lambda name: (name[:8] != "choices.", name[:5] == "plan.", name)):
        if ours.get(name) != theirs.get(name):
            values = (f"{name.removeprefix('choices.')}={of.get(name, 'null')}" for of in (ours, theirs))
            first, second = (plain(text[:200]) for text in values)
            return first, second
    return "another configuration", "its own"


def flatten_values(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """The values in a document, each with the way to it."""
    if isinstance(value, Mapping):
        for part, inner in value.items():
            yield from flatten_values(inner, f"{name}.{part}" if name else part)
    elif isinstance(value, Sequence) and not isinstance(value, str) and any(isinstance(v, Mapping) for v in value):
        for index, inner in enumerate(value):
            yield from flatten_values(inner, f"{name}.{index}")
    else:
        yield name, value if isinstance(value, str) else json.dumps(value)
