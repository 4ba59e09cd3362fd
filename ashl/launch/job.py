"""A job to launch: a command of ashl, the number of its processes, and the machines for them.

Each engine (`ashl.launch.slurm` and its neighbours) turns a `Launch` into commands or a script.
"""

import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ashl.cluster.spec import ProfileCluster
from ashl.errors import UsageError
from ashl.launch.environment import PORTS
from ashl.plan.files import read_plan
from ashl.planning.compile_plan import draw_compute_factors
from ashl.planning.instantiate import OptionFactory
from ashl.stage.contract import extra_ranks

HOST = r"(?:[\w.][\w.-]*@)?[\w.][\w.-]*|[0-9a-fA-F:]*:[0-9a-fA-F:]*:[0-9a-fA-F:.]*"
KIND = r"[\w.][\w./-]*=[\w./:&|!,*()-]+"
LINE = re.compile(rf"(?P<name>(?!slots=)(?:{KIND}|{HOST}))(?:\s+slots=(?P<slots>\d{{1,4}}))?")
# Prefixes of the variables of this process that every rank gets.
COPIED = ("ASHL_", "NCCL_", "GLOO_", "OMP_")
RANK = ("-P", "-m", "ashl.cli")  # arguments of Python that start a rank
GUARD_GRACE_S = 14  # seconds between SIGTERM and SIGKILL to a guarded rank; ssh kills after 15
# A shell around a rank. It passes a signal on, also one that arrives before the rank's number is
# known, and starts the rank again if it was killed. Rank 0 is not started again: it serves the
# job's store.
GUARD = (
    "rank=${{RANK:-${{SLURM_PROCID:-${{OMPI_COMM_WORLD_RANK:-${{PMI_RANK:-0}}}}}}}}; "
    "n={restarts}; stop=; pid=; told=; "
    'end() {{ [ -n "$pid" ] && [ -z "$told" ] || return 0; told=1; kill -TERM $pid; '
    "(sleep {grace_s}; kill -KILL $pid) >/dev/null 2>&1 & }}; "
    "trap 'stop=1; end' TERM HUP INT; "
    'while :; do pid=; told=; "$@" & pid=$!; [ -z "$stop" ] || end; wait $pid; code=$?; '
    "while kill -0 $pid 2>/dev/null; do wait $pid; code=$?; done; "
    '[ -z "$stop" ] && [ "$rank" != 0 ] && [ $n -gt 0 ] || break; '
    "[ $code -gt 128 ] || break; "
    'echo "ashl: rank $rank ended with exit code $code and is started again" >&2; '
    "n=$((n - 1)); done; {after}exit $code"
)


class Machine(NamedTuple):
    """A line of a hosts file: one host, or with `KEY=VALUE` any machines of one kind."""

    login: str  # a name, an address or an alias in ssh's configuration, perhaps with `user@`
    slots: int  # the number of ranks that it can run

    @property
    def name(self) -> str:
        return self.login.rpartition("@")[2]

    @property
    def kind(self) -> tuple[str, str] | None:
        """Return key and value of a kind of machine; None for a host."""
        key, equals, value = self.login.partition("=")
        return (key, value) if equals else None


class HostRanks(NamedTuple):
    """The consecutive ranks of a job that run on one line of the hosts file."""

    machine: Machine
    ranks: range


class Task(NamedTuple):
    """A process to start on a host: one rank, or an agent of torchrun with its first rank."""

    machine: Machine
    rank: int
    argv: tuple[str, ...]
    env: dict[str, str]  # variables of this task, beside those of the job


@dataclass(frozen=True)
class Launch:
    """A job to launch. Without machines the engine chooses them."""

    engine: str
    argv: tuple[str, ...]  # arguments of ashl
    size: int  # the number of processes; 0 = not known yet
    machines: tuple[Machine, ...]
    python: str  # with ashl, on every machine
    folder: str  # the working directory of every rank
    env: Mapping[str, str]  # variables of every rank, with the job's secret
    options: tuple[str, ...] = ()  # options of the engine's own command
    ssh: tuple[str, ...] = ("ssh",)  # command of ssh and the user's options
    restarts: int = 0  # how often each rank is started again after it was killed

    @property
    def slots(self) -> int:
        return sum(machine.slots for machine in self.machines)

    @property
    def shares(self) -> tuple[HostRanks, ...]:
        """Return ranks 0 to size − 1 on the slots in order, without machines that have no rank."""
        shares = []
        first = 0  # rank
        for machine in self.machines:
            if count := min(machine.slots, self.size - first):
                shares.append(HostRanks(machine, range(first, first + count)))
            first += count
        return tuple(shares)

    @property
    def rank_command(self) -> list[str]:
        """Return the command of one rank."""
        return self.guard_command([self.python, *RANK, *self.argv])

    def guard_command(self, command: list[str], after: str = "") -> list[str]:
        """Return a command that starts a rank again after it was killed, `restarts` times.

        Args: after, statements of the shell that follow the last end, with its exit code in `code`.
        """
        if not self.restarts and not after:
            return command
        script = GUARD.format(restarts=self.restarts, grace_s=GUARD_GRACE_S, after=after)
        return ["sh", "-c", script, "ashl", *command]

    @property
    def hosts(self) -> tuple[HostRanks, ...]:
        """Return `shares`. Raises UsageError if a line of the hosts file names a kind."""
        for machine in self.machines:
            if machine.kind:
                raise UsageError(
                    f"--hosts: {machine.login} is a kind of machine, and --on {self.engine} needs"
                    " names of hosts; name hosts, or take --on slurm or --on kubernetes"
                )
        return self.shares


def random_port() -> int:
    """Return a port for the store of a job; another job takes it with probability 1/20,000."""
    return secrets.choice(PORTS)


def read_machines(path: Path) -> tuple[Machine, ...]:
    """Return the machines of a hosts file.

    Each line is `host`, `user@host` or `KEY=VALUE`, perhaps with `slots=2`; `#` begins a comment.
    Raises: UsageError if the file cannot be read or names no host, or if a line is invalid or
    repeats a host.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = str(error.strerror).lower() if isinstance(error, OSError) else "it is no text"
        raise UsageError(
            f"the hosts file {path} cannot be read ({why}); name a file with one host per line"
        ) from error
    found: dict[str, tuple[int, Machine]] = {}
    for number, line in enumerate(lines, 1):
        if not (text := line.partition("#")[0].strip()):
            continue
        match = LINE.fullmatch(text)
        if match is None or (match["slots"] is not None and not int(match["slots"])):
            raise UsageError(
                f"{path}, line {number}: {text[:60]!r} is no host; write `host`, or `host slots=2`"
            )
        machine = Machine(match["name"], int(match["slots"] or 1))
        if machine.name in found:
            raise UsageError(
                f"{path}, line {number}: {machine.name} is there in line {found[machine.name][0]}"
                " already; to run several ranks on it, write slots=2 once"
            )
        found[machine.name] = number, machine
    if not found:
        raise UsageError(f"{path} names no host; write one in each line, as in `node1 slots=2`")
    return tuple(machine for _, machine in found.values())


def copied_environment(env: Mapping[str, str], wanted: Iterable[str]) -> dict[str, str]:
    """Return the variables of this process that every rank gets: those with a prefix of `COPIED`,
    and those of --env, each NAME or NAME=VALUE.

    Raises: UsageError for a NAME that is not set.
    """
    found = {name: value for name, value in env.items() if name.startswith(COPIED)}
    for text in wanted:
        name, equals, value = text.partition("=")
        if not name or (not equals and name not in env):
            raise UsageError(
                f"--env {text}: it is not set here; give it a value, as in --env {name or 'NAME'}=1"
            )
        found[name] = value if equals else env[name]
    return found


def job_size(config: Mapping[str, Any], launch: Launch) -> int:
    """Return the number of processes of a run.

    If the configuration sets the number of workers: the workers and a server or coordinator.
    Otherwise the number of slots.
    Raises: UsageError if nothing sets the number, or if there are too few slots.
    """
    options = OptionFactory(config["allow_targets"])
    topology, schedule, sync = (
        options.get_option(group, config[group]) for group in ("topology", "schedule", "sync")
    )
    cluster = options.get_option("cluster", draw_compute_factors(config["cluster"], config["seed"]))
    if isinstance(cluster, ProfileCluster):
        raise UsageError(
            "cluster=profile is in virtual time, which needs no hosts; set cluster=real, or remove"
            " the hosts"
        )
    slots = launch.slots
    workers = cluster.num_workers
    extra = extra_ranks(topology, None if schedule.names_sync else sync, cluster.node)
    if config["plan"]:
        plan = read_plan(config["plan"])
        workers, extra = plan.num_workers, plan.num_ranks - plan.num_workers
    needed = slots if workers is None else workers + extra
    if not needed:
        raise UsageError(
            "nothing gives the number of processes; set cluster.num_workers, or name the machines"
            " by --hosts FILE"
        )
    if slots and needed > slots:
        beside = (" and a server" if topology.has_server else " and a coordinator") if extra else ""
        raise UsageError(
            f"{workers} workers{beside} need {needed} slots, and the hosts have {slots}; name more"
            " hosts, or write slots=2"
        )
    return needed
