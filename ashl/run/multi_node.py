"""A job on several nodes: the launcher assigns ranks to hosts and starts them over ssh.

`read_hosts` and `assign_slots` decide which ranks run on which host. `connect_nodes` starts a node
agent on each host (`ashl.run.node_agent`), over ssh or, for `localhost`, as a local process.
`run_job` runs the job:

1. Each agent sends a greeting: its version, a free port and addresses.
2. The launcher sends each agent one order with its ranks, and a heartbeat every `PULSE_S`. An agent
   without heartbeats for `SILENCE_S` ends its ranks.
3. Each agent sends records: lines of its ranks' output, and their exit codes.
4. `SETTLE_S` after the first failure that is not tolerated, or at the user's first interrupt, the
   launcher sends STOP. The ranks then finish their records and exit. The launcher sends KILL
   `GRACE_S + SETTLE_S` later, or at the second interrupt.
"""

import json
import queue
import re
import secrets
import subprocess
import sys
import tarfile
import threading
import time
import unicodedata
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from shlex import join
from typing import IO, Any, NamedTuple, TextIO

from pydantic import BaseModel, ValidationError

from ashl import __version__
from ashl.cluster.spec import ProfileCluster
from ashl.errors import AshlError, UsageError, plain
from ashl.plan.files import read_plan
from ashl.planning.compile_plan import draw_compute_factors
from ashl.planning.instantiate import OptionFactory
from ashl.run.authenticated_store import SECRET
from ashl.run.interface import LOCAL, is_loopback
from ashl.run.node_agent import GRACE_S, KILL, MAX_LINE, PULSE, SILENCE_S, STOP
from ashl.run.process_setup import EXIT_EVICTED, handle_signals, titled
from ashl.run.supervisor import describe_exit
from ashl.run.train import is_virtual
from ashl.stage.stage import FAULT_TOLERANT, extra_ranks

LINE = re.compile(
    r"(?P<login>(?:[\w.][\w.-]*@)?[\w.][\w.-]*|[0-9a-fA-F:]*:[0-9a-fA-F:]*:[0-9a-fA-F:.]*)(?:\s+slots=(?P<slots>\d{1,4}))?"
)
# Prefixes of the launcher's environment variables that every rank gets.
COPIED = ("ASHL_", "NCCL_", "GLOO_", "OMP_")


class Host(NamedTuple):
    """A line of a hostfile."""

    # argument of ssh: a name, an address or an alias in ssh's configuration, perhaps with `user@`
    login: str
    slots: int  # the number of ranks that it can run

    @property
    def name(self) -> str:
        return self.login.rpartition("@")[2]


class HostRanks(NamedTuple):
    """The consecutive ranks of a job that run on one host; the first one has LOCAL_RANK 0."""

    host: Host
    ranks: range


def read_hosts(path: Path) -> tuple[Host, ...]:
    """Return the hosts of a hostfile.

    Each line is `host`, `user@host` or `host slots=2`; `#` begins a comment.
    Raises: UsageError if the file cannot be read or names no host, or if a line is invalid or
    repeats a host.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"--hosts {path}: it cannot be read ({why})") from error
    found: dict[str, tuple[int, Host]] = {}
    for number, line in enumerate(lines, 1):
        if not (text := line.partition("#")[0].strip()):
            continue
        match = LINE.fullmatch(text)
        if match is None or (match["slots"] is not None and not int(match["slots"])):
            raise UsageError(
                f"{path}, line {number}: {text[:60]!r} is no host; write `host`, or `host slots=2`"
            )
        host = Host(match["login"], int(match["slots"] or 1))
        if host.name in found:
            first = found[host.name][0]
            raise UsageError(
                f"{path}, line {number}: {host.name} is there in line {first} already; to run"
                " several ranks on it, write slots=2 once"
            )
        found[host.name] = number, host
    if not found:
        raise UsageError(f"{path} names no host; write one in each line, as in `node1 slots=2`")
    return tuple(host for _, host in found.values())


def assign_slots(hosts: Sequence[Host], size: int) -> tuple[HostRanks, ...]:
    """Assign ranks 0 to size − 1 to the slots in order, and return the hosts that have a rank."""
    shares, first = [], 0
    for host in hosts:
        if count := min(host.slots, size - first):
            shares.append(HostRanks(host, range(first, first + count)))
        first += count
    return tuple(shares)


def describe_idle_slots(hosts: Sequence[Host], size: int) -> str:
    """Return the idle slots as text, as in `node2 (1 of 2 slots), node3`; "" if there are none."""
    taken = {share.host: len(share.ranks) for share in assign_slots(hosts, size)}
    left = {host: host.slots - taken.get(host, 0) for host in hosts}
    return ", ".join(
        host.name if host not in taken else f"{host.name} ({count} of {host.slots} slots)"
        for host, count in left.items()
        if count
    )


def ranks_environment(
    share: HostRanks, group: int, size: int, master: tuple[str, int]
) -> dict[int, dict[str, str]]:
    """Return the environment variables of torchrun by rank of this host.

    Args: group, the index of the host; size, the number of ranks; master, host and port of the
    store.
    """
    common = {
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": len(share.ranks),
        "GROUP_RANK": group,
        "MASTER_ADDR": master[0],
        "MASTER_PORT": master[1],
    }
    own = {
        rank: common | {"RANK": rank, "LOCAL_RANK": local} for local, rank in enumerate(share.ranks)
    }
    return {rank: {name: str(value) for name, value in env.items()} for rank, env in own.items()}


def copied_environment(env: Mapping[str, str], wanted: Iterable[str]) -> dict[str, str]:
    """Return the launcher's variables that every rank gets: those with a prefix of `COPIED`, and
    those of --env, each NAME or NAME=VALUE.

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


def master_address(first: Host, reached_at: str | None, seen_from: Sequence[str | None]) -> str:
    """Return the address at which the other hosts can reach the first host.

    It is the address at which the launcher reached the first host, or that host's name. If it is
    loopback, the launcher runs on the first host. Then the result is the launcher's address as
    another host sees it, or 127.0.0.1 if all of them see loopback.
    Args: reached_at, the address in the first host's greeting; seen_from, the launcher's address in
    the greetings of the other hosts.
    """
    own = reached_at or first.name
    if not is_loopback(own):
        return own
    return next(
        (address for address in seen_from if address and not is_loopback(address)), "127.0.0.1"
    )


CONNECT_S = 10  # seconds for ssh to connect
GREETING_S = 60.0  # seconds for Python to start on a node, perhaps from a slow disk
UNREACHED = "does not answer"
QUIET = ("-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}")
LIVELY = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")


@dataclass(frozen=True)
class Launch:
    """The hosts of a job, and how ranks are started there."""

    hosts: tuple[Host, ...]
    # The command of ssh and the user's options. ashl appends its own options. If an option is given
    # twice, ssh uses the first value, which is the user's.
    ssh: tuple[str, ...]
    python: str
    folder: str  # the working directory of every rank
    env: Mapping[str, str]
    size: int | None = None  # the number of ranks, if the user sets it
    port: int | None = None  # port of the job's store, on the first host; None: a free port
    verbose: bool = False

    @property
    def slots(self) -> int:
        return sum(host.slots for host in self.hosts)


class Greeting(BaseModel):
    """The first line of a node agent."""

    ashl: str  # version
    port: int | None  # for the job's store; None = the port that the launcher asked for is taken
    reached_at: str | None  # the node's address at which ssh reached it
    seen_from: str | None  # the launcher's address as the node sees it


@dataclass
class Connection:
    """A connection to the node agent of one host: by ssh, or to a local process for `localhost`."""

    share: HostRanks
    process: subprocess.Popen[bytes]
    stdin: IO[bytes]
    greeting: Greeting | None = None
    # lines that are no records of the agent: errors of ssh, Python or a shell on the node
    words: list[str] = field(default_factory=list)
    running: set[int] = field(default_factory=set)  # its ranks that have not ended
    open: bool = True
    listeners: list[threading.Thread] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.share.host.name

    @property
    def last_words(self) -> str:
        return next((plain(text) for text in reversed(self.words) if text.strip()), "")

    def send(self, line: bytes) -> None:
        with suppress(OSError):  # the connection has ended; `handle_disconnect` reports that
            self.stdin.write(line + b"\n")
            self.stdin.flush()


class OutputLine(NamedTuple):
    """A line of a connection's output or errors; None at the end of its output."""

    connection: Connection
    line: str | None
    error: bool = False


Inbox = queue.SimpleQueue[OutputLine]


class InterruptRequest:
    """A signal handler that counts the user's requests to end the job."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, number: int, frame: object) -> None:
        self.times += 1


def command(where: Launch, host: Host, remote: Sequence[str]) -> list[str]:
    """Return the command line that runs `remote` on a host: by ssh, or directly for `localhost`."""
    if host.login == LOCAL:
        return [*remote]
    return [*where.ssh, *QUIET, *LIVELY, host.login, f"exec {join(remote)}"]


@contextmanager
def connect_nodes(
    where: Launch, shares: Sequence[HostRanks]
) -> Generator[tuple[list[Connection], Inbox]]:
    """Start a node agent on every host, and end all agents when the context ends.

    Each agent has its own process group, so a Ctrl-C in the terminal reaches the launcher only.
    Raises: UsageError if ssh or Python cannot be started.
    """
    inbox: Inbox = queue.SimpleQueue()
    connections: list[Connection] = []
    try:
        for share in shares:
            port = [] if where.port is None or connections else [str(where.port)]
            agent = [where.python, "-P", "-m", "ashl.run.node_agent", *port]
            argv = command(where, share.host, agent)
            try:
                process = subprocess.Popen(
                    argv,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            except OSError as error:
                option = "--python" if share.host.login == LOCAL else "--ssh"
                raise UsageError(f"{option} {argv[0]}: {error.strerror}") from error
            assert process.stdin is not None
            connections.append(connection := Connection(share, process, process.stdin))
            for stream, error in ((process.stdout, False), (process.stderr, True)):
                listener = threading.Thread(
                    target=read_stream, args=(connection, stream, error, inbox), daemon=True
                )
                connection.listeners.append(listener)
                listener.start()
        yield connections, inbox
    finally:
        for connection in connections:
            with suppress(OSError):
                connection.stdin.close()  # the agent then ends its ranks
        end = time.monotonic() + 1.0
        for connection in connections:
            process = connection.process
            # at SIGTERM an agent on this machine ends its ranks before it exits
            for end_process, until in ((process.terminate, end), (process.kill, end + 4.0)):
                try:
                    process.wait(max(0.0, until - time.monotonic()))
                except subprocess.TimeoutExpired:
                    end_process()
            process.wait()
            for listener in connection.listeners:
                listener.join(1.0)


def read_stream(connection: Connection, stream: IO[bytes], error: bool, inbox: Inbox) -> None:
    """Put the lines of a connection's output or errors into the inbox, until the stream ends."""
    with stream:
        for line in iter(lambda: stream.readline(8 * MAX_LINE), b""):
            inbox.put(OutputLine(connection, line.decode(errors="replace").rstrip("\r\n"), error))
    if not error:
        for other in connection.listeners:
            if other is not threading.current_thread() and other.is_alive():
                other.join(1.0)  # first read the errors, which explain why the connection ended
        inbox.put(OutputLine(connection, None))


def next_line(inbox: Inbox, wait_s: float) -> OutputLine | None:
    """Return the next line; None if there is none within `wait_s`."""
    try:
        return inbox.get(timeout=wait_s)
    except queue.Empty:
        return None


def await_greetings(
    connections: Sequence[Connection], inbox: Inbox, interrupt: InterruptRequest, python: str
) -> list[Greeting]:
    """Return the greetings of all node agents; an empty list if the user interrupts.

    Raises: AshlError that names each host that cannot take part and the reason: no answer within
    `GREETING_S`, no ashl, or another version of ashl.
    """
    end = time.monotonic() + GREETING_S
    while any(c.open and c.greeting is None for c in connections) and time.monotonic() < end:
        if interrupt.times:
            return []
        if (found := next_line(inbox, 0.1)) is None:
            continue
        connection, line, error = found
        if line is None:
            connection.open = False
        elif error:
            connection.words.append(line)
        else:
            try:
                connection.greeting = Greeting.model_validate_json(line)
            except ValidationError:  # a login shell may print a message of the day
                connection.words.append(line)
    faults: dict[str, list[str]] = {}
    for connection in connections:
        if text := explain_fault(connection, python):
            faults.setdefault(text, []).append(connection.name)
    if faults:
        raise AshlError("; ".join(f"{', '.join(names)} {text}" for text, names in faults.items()))
    return [connection.greeting for connection in connections if connection.greeting]


def explain_fault(connection: Connection, python: str) -> str:
    """Return why a host cannot take part, as a phrase that follows its name; "" if it can."""
    if (greeting := connection.greeting) is not None:
        same = greeting.ashl == __version__
        return (
            ""
            if same
            else (
                f"has ashl {plain(greeting.ashl)}, and this machine {__version__}; install the same"
            )
        )
    words = connection.last_words
    if connection.open:
        return f"{UNREACHED} for {GREETING_S:g} s" + (f" ({words})" if words else "")
    code = connection.process.wait()
    if "No module named" in words:
        return f"has no ashl in {python}; install it there, or name another Python by --python"
    if code == 127:
        return f"has no {python}; name the Python that has ashl there by --python"
    if code == 255:
        return (
            UNREACHED
            + (f" ({words})" if words else "")
            + "; `ssh HOST true` has to work without a question"
        )
    return f"cannot start its ranks: {python} ended with exit code {code}" + (
        f" ({words})" if words else ""
    )


def printable(text: str) -> str:
    """Return a text without control characters, which a terminal might execute as commands."""
    if text.isprintable():
        return text
    return "".join(
        character
        for character in text
        if character == "\t" or unicodedata.category(character)[0] != "C"
    )


PULSE_S = 2.0  # seconds between two heartbeats to the node agents
# seconds after the first failure in which other ranks can notice it and finish their records
SETTLE_S = 5.0
LOST = "failed during the run"
CONTROLLER_RANK = 0  # the rank in whose process the controller runs
RANK = ("-P", "-m", "ashl.cli")  # arguments of Python that start a rank
# lines of errors shown of each rank except 0; the last of them is a hint at --verbose
MAX_LINES = 10
CODES = (1, 2, 3, 130)  # exit codes of an ashl command that did not succeed


class AgentRecord(BaseModel):
    """A line of a node agent after its greeting: `rank` and one other field are set."""

    rank: int = 0
    out: str | None = None  # a line of the rank's output
    err: str | None = None  # a line of the rank's errors
    code: int | None = None  # the rank's exit code
    failed: str | None = None  # why the agent cannot start its ranks


class Failure(NamedTuple):
    """A failure that ends the job: exit code, message, and the launcher's time in seconds."""

    code: int
    sentence: str
    at_s: float


def run_job(where: Launch, size: int, argv: Sequence[str], tolerates_failures: bool = False) -> int:
    """Run `ashl ARGV` on `size` slots until all ranks have ended, and return its exit code.

    At the first Ctrl-C or SIGTERM the ranks finish their records and exit. At the second one they
    are killed. The exit code is then 130.
    Args: tolerates_failures, True if a killed or evicted rank, or a failed node, does not end the
    job. Then the controller decides whether the run continues. A failure of rank 0 or of its node
    always ends the job.
    Raises: AshlError if a node cannot take part (no rank was started) or fails, with the node's
    name; UsageError if `where.port` is taken or `where.folder` does not exist.
    """
    shares, interrupt = assign_slots(where.hosts, size), InterruptRequest()
    with (
        titled("ashl launcher"),
        handle_signals(interrupt),
        connect_nodes(where, shares) as (connections, inbox),
    ):
        if not (greetings := await_greetings(connections, inbox, interrupt, where.python)):
            return 130
        first, *others = greetings
        if first.port is None:
            raise UsageError(
                f"--port {where.port} is taken on {connections[0].name}; set another port, or"
                " remove --port"
            )
        address = "127.0.0.1"
        if others:
            address = master_address(
                shares[0].host, first.reached_at, [other.seen_from for other in others]
            )
        # other users can read command lines, so the order carries the secret
        env = {**where.env, SECRET: secrets.token_hex(32)}
        order = {"argv": [*RANK, *argv], "folder": where.folder, "env": env}
        for group, connection in enumerate(connections):
            own = ranks_environment(connection.share, group, size, (address, first.port))
            connection.running = set(own)
            connection.send(json.dumps({**order, "ranks": list(own.items())}).encode())
        return supervise_nodes(
            connections, inbox, interrupt, Report(where.verbose), tolerates_failures
        )


def job_size(config: Mapping[str, Any], where: Launch) -> int:
    """Return the number of processes of a run.

    If the configuration sets the number of workers: the workers and a server or coordinator.
    Otherwise --np, or else the number of slots.
    Raises: UsageError if --np and the configuration differ, or if there are too few slots.
    """
    asked = where.size
    slots = where.slots
    options = OptionFactory(config["allow_targets"])
    topology, schedule, sync = (
        options.of(group, config[group]) for group in ("topology", "schedule", "sync")
    )
    cluster = options.of("cluster", draw_compute_factors(config["cluster"], config["seed"]))
    if isinstance(cluster, ProfileCluster):
        raise UsageError(
            "cluster=profile is in virtual time, which needs no hosts; set cluster=real, or remove"
            " the hosts"
        )
    workers = cluster.num_workers
    extra = extra_ranks(topology, None if schedule.names_sync else sync, cluster.node)
    if config["plan"]:
        plan = read_plan(config["plan"])
        workers, extra = plan.num_workers, plan.num_ranks - plan.num_workers
    needed = (asked or slots) if workers is None else workers + extra
    beside = (" and a server" if topology.has_server else " and a coordinator") if extra else ""
    if asked not in (None, needed):
        raise UsageError(
            f"--np {asked}: {workers} workers{beside} are {needed} processes; remove --np or set"
            f" --np {needed}"
        )
    if needed > slots:
        what = f"--np {needed}" if workers is None else f"{workers} workers{beside}"
        raise UsageError(
            f"{what} need {needed} slots, and the hosts have {slots}; name more hosts, or write"
            " slots=2"
        )
    return needed


def tolerates_failures(config: Mapping[str, Any]) -> bool:
    """Return True if a run with this topology can continue after a worker failure."""
    return (
        FAULT_TOLERANT
        in OptionFactory(config["allow_targets"]).of("topology", config["topology"]).supports
    )


def real_job_size(config: Mapping[str, Any], where: Launch) -> int | None:
    """Return `job_size`; None for a run in virtual time, which needs no hosts."""
    return None if is_virtual(config) else job_size(config, where)


def check_nodes(where: Launch, size: int) -> None:
    """Raise AshlError if hosts cannot take part in a job of this size; it names all of them."""
    with connect_nodes(where, assign_slots(where.hosts, size)) as (connections, inbox):
        await_greetings(connections, inbox, InterruptRequest(), where.python)


class Report:
    """The output that the user sees.

    Rank 0: all lines of its output. Other ranks: none of their output, unless `verbose`.
    Errors: a line that ranks print more than once is shown once. Once the job is asked to end, only
    error messages of ashl ("ashl: ...") are shown. Messages of other ranks follow at the end,
    unless rank 0 printed them. With `verbose` all lines of other ranks are shown at once.
    """

    def __init__(self, verbose: bool) -> None:
        self.verbose = verbose
        self.ending = False  # True once the job is asked to end
        self.complaints: set[str] = set()  # errors that were shown
        self.lines: Counter[int] = Counter()  # errors that were shown, by rank
        # error messages of ashl from other ranks, with the name of the first rank that printed each
        self.sentences: dict[str, str] = {}

    def show(self, name: str, rank: int, text: str, error: bool) -> None:
        last = error and text.startswith("ashl: ")
        if self.verbose and rank:
            write(sys.stderr, f"{name} r{rank} | {text}")
        elif last and rank:
            self.sentences.setdefault(text, f"{name} r{rank}")
        elif not error and not rank:
            write(sys.stdout, text)
        # ranks that are interrupted may print errors, which the user does not need
        elif last or (error and not self.ending and text not in self.complaints):
            self.complaints.add(text)
            self.lines[rank] += 1
            text = "... (--verbose shows all)" if rank and self.lines[rank] == MAX_LINES else text
            if not rank or self.lines[rank] <= MAX_LINES:
                write(sys.stderr, f"{name} r{rank} | {text}" if rank else text)

    def close(self) -> bool:
        """Show the remaining error messages; return True if any rank printed one of ashl."""
        for text, name in self.sentences.items():
            if text not in self.complaints:
                write(sys.stderr, f"{name} | {text}")
        return bool(self.sentences) or any(text.startswith("ashl: ") for text in self.complaints)


def write(stream: TextIO, text: str) -> None:
    """Write a line without buffering."""
    stream.write(f"{text}\n")
    stream.flush()


def supervise_nodes(
    connections: Sequence[Connection],
    inbox: Inbox,
    interrupt: InterruptRequest,
    report: Report,
    tolerates_failures: bool,
) -> int:
    """Show the ranks' output until all have ended, and return the job's exit code.

    After the first failure that is not tolerated, the launcher asks all ranks to exit. Later it
    kills those that have not exited (see the module's head).
    Raises: AshlError or UsageError with that failure, if no rank has printed an error of ashl.
    """
    failure: Failure | None = None
    asked_at, pulse_at = None, 0.0
    while any(connection.open for connection in connections):
        now = time.monotonic()
        if interrupt.times > 1 or (asked_at is not None and now - asked_at > GRACE_S + SETTLE_S):
            broadcast(connections, KILL)
            break
        if asked_at is None and (
            interrupt.times or (failure is not None and now - failure.at_s > SETTLE_S)
        ):
            asked_at, report.ending = now, True
            broadcast(connections, STOP)
        if now - pulse_at > PULSE_S:
            pulse_at = now
            broadcast(connections, PULSE)
        if (
            (found := next_line(inbox, 0.1))
            and (wrong := handle_output(found, report, tolerates_failures))
            and failure is None
        ):
            failure = wrong
    explained = report.close()
    if interrupt.times:
        return 130
    if failure is None:
        return 0
    if not explained:
        raise (UsageError if failure.code == 2 else AshlError)(failure.sentence)
    return failure.code


def handle_output(found: OutputLine, report: Report, tolerates_failures: bool) -> Failure | None:
    """Show a line of a host; return the failure that it reports if that ends the job, else None."""
    connection, line, error = found
    if line is None:
        return handle_disconnect(connection, tolerates_failures)
    try:
        record = AgentRecord() if error else AgentRecord.model_validate_json(line)
    except ValidationError:
        error, record = True, AgentRecord()
    if error:
        connection.words.append(line)
    for text, is_error in ((record.out, False), (record.err, True)):
        if text is not None:
            report.show(connection.name, record.rank, printable(text), is_error)
    if record.failed is not None:
        connection.running.clear()
        sentence = f"{connection.name}: {plain(record.failed)}; name a folder that every host has"
        return Failure(2, f"{sentence} by --folder", time.monotonic())
    if record.code is None:
        return None
    return handle_exit(connection, record.rank, record.code, tolerates_failures)


def handle_disconnect(connection: Connection, tolerates_failures: bool) -> Failure | None:
    """Handle the end of a connection; return the failure if that ends the job, else None."""
    connection.open = False
    if not connection.running:
        return None
    # the controller decides whether the run continues without the ranks of another host
    if tolerates_failures and CONTROLLER_RANK not in connection.running:
        names = ", ".join(f"rank {rank}" for rank in sorted(connection.running))
        connection.running.clear()
        write(sys.stderr, f"ashl: {connection.name} {LOST}, with {names}")
        return None
    words = connection.last_words or "the connection has ended"
    sentence = f"{connection.name} {LOST} ({words}); its ranks end within {SILENCE_S:g} s"
    return Failure(1, sentence, time.monotonic())


def handle_exit(
    connection: Connection, rank: int, code: int, tolerates_failures: bool
) -> Failure | None:
    """Handle the exit of a rank; return the failure if that ends the job, else None."""
    connection.running.discard(rank)
    if code == 0:
        return None
    sentence = f"rank {rank} on {connection.name} {describe_exit(code)}"
    # the controller decides whether the run continues after the failure of another rank
    if tolerates_failures and rank != CONTROLLER_RANK and (code < 0 or code == EXIT_EVICTED):
        write(sys.stderr, f"ashl: {sentence}")
        return None
    return Failure(code if code in CODES else 1, sentence, time.monotonic())


def fetch_run_folder(where: Launch, run_dir: Path) -> bool:
    """Copy the files of a run folder from the first host, where the controller runs.

    Returns: True if at least one file was copied.
    Limits: only plain files of the folder itself, no links and no subfolders.
    """
    there = str(Path(where.folder, run_dir))
    count = 0
    remote = command(where, where.hosts[0], ["tar", "-C", there, "-cf", "-", "."])
    process = subprocess.Popen(
        remote, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    with (
        process,
        suppress(tarfile.TarError),
        tarfile.open(fileobj=process.stdout, mode="r|") as archive,
    ):
        for member in archive:
            content = archive.extractfile(member) if member.isfile() else None
            if content is not None and "/" not in (name := member.name.removeprefix("./")):
                run_dir.joinpath(name).write_bytes(content.read())
                count += 1
    return count > 0


def broadcast(connections: Sequence[Connection], line: bytes) -> None:
    """Send a line to all node agents."""
    for connection in connections:
        connection.send(line)
