"""A job on several hosts, one ssh for each: who is there, what their ranks say, and that all of it ends together."""

import json
import secrets
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from pydantic import BaseModel, ValidationError

from ashl.cluster.spec import ProfileCluster
from ashl.errors import AshlError, UsageError, plain
from ashl.plan.files import read_plan
from ashl.planning.compile_plan import draw_compute_factors
from ashl.planning.instantiate import OptionFactory
from ashl.run.authenticated_store import SECRET
from ashl.run.hosts import assign_slots, master_address, ranks_environment
from ashl.run.node_agent import GRACE_S, KILL, PULSE, SILENCE_S, STOP
from ashl.run.ssh import (
    Connection,
    Inbox,
    InterruptRequest,
    Launch,
    OutputLine,
    await_greetings,
    command,
    connect_nodes,
    next_line,
    printable,
)
from ashl.run.supervisor import describe_exit
from ashl.run.train import is_virtual
from ashl.run.watchdog import EXIT_EVICTED, handle_signals
from ashl.stage.stage import FAULT_TOLERANT, extra_ranks

PULSE_S = 2.0
SETTLE_S = 5.0  # after the first failure: for the others to notice, and to finish their records
LOST = "was lost during the run"
HOME = 0  # the rank in whose process the records are kept
RANK = ("-P", "-m", "ashl.cli")  # to Python
MAX_LINES = 10  # of each rank but 0: a library that fails says much, all of it of no use
CODES = (1, 2, 3, 130)  # what a command of ours ends with, if not well


class AgentRecord(BaseModel):
    """What it says later: one of these, of a rank or of itself."""

    rank: int = 0
    out: str | None = None
    err: str | None = None
    code: int | None = None
    failed: str | None = None


class Failure(NamedTuple):
    """The first thing that went wrong."""

    code: int
    sentence: str
    at: float


def run_job(where: Launch, size: int, argv: Sequence[str], may_lose: bool = False) -> int:
    """Start `ashl ARGV` on as many slots, and see it to its end; returns its exit code, 130 if interrupted.

    With `may_lose` a rank that is killed, or a host that is lost, is no failure before the home of the run says so.
    The first Ctrl-C or SIGTERM ends the job in order, the second one at once. Raises AshlError naming the host where
    one cannot take part (then nothing was started anywhere) or is lost, and UsageError for a folder that is not there.
    """
    shares, interrupt = assign_slots(where.hosts, size), InterruptRequest()
    with handle_signals(interrupt), connect_nodes(where, shares) as (connections, inbox):
        if not (greetings := await_greetings(connections, inbox, interrupt, where.python)):
            return 130
        first, *others = greetings
        if first.port is None:
            raise UsageError(f"--port {where.port} is taken on {connections[0].name}; give another, or none.")
        address = "127.0.0.1"
        if others:
            address = master_address(shares[0].host, first.reached_at, [other.seen_from for other in others])
        env = {**where.env, SECRET: secrets.token_hex(32)}  # by which they know each other; it is in no command line
        order = {"argv": [*RANK, *argv], "folder": where.folder, "env": env}
        for group, connection in enumerate(connections):
            own = ranks_environment(connection.share, group, size, (address, first.port))
            connection.running = set(own)
            connection.send(json.dumps({**order, "ranks": list(own.items())}).encode())
        return supervise_nodes(connections, inbox, interrupt, Report(where.verbose), may_lose)


def job_size(config: Mapping[str, Any], where: Launch) -> int:
    """How many processes this run takes: all slots, where neither the user nor the configuration says. Raises
    UsageError where these do not agree, or there are fewer slots."""
    asked, slots, options = where.size, where.slots, OptionFactory(config["allow_targets"])
    topology, schedule, sync = (options.of(group, config[group]) for group in ("topology", "schedule", "sync"))
    cluster = options.of("cluster", draw_compute_factors(config["cluster"], config["seed"]))
    if isinstance(cluster, ProfileCluster):
        raise UsageError("cluster=profile is in virtual time, which needs no hosts; take cluster=real, or leave it out")
    workers, extra = cluster.num_workers, extra_ranks(topology, None if schedule.names_sync else sync, cluster.node)
    if config["plan"]:
        plan = read_plan(config["plan"])
        workers, extra = plan.num_workers, plan.num_ranks - plan.num_workers
    needed = (asked or slots) if workers is None else workers + extra
    beside = (" and a server" if topology.has_server else " and a coordinator") if extra else ""
    if asked not in (None, needed):
        raise UsageError(f"--np {asked}: {workers} workers{beside} are {needed} processes; drop one of the two.")
    if needed > slots:
        what = f"--np {needed}" if workers is None else f"{workers} workers{beside}"
        raise UsageError(f"{what} need {needed} slots, and the hosts have {slots}; name more hosts, or write slots=2.")
    return needed


def may_lose(config: Mapping[str, Any]) -> bool:
    """Whether such a run may go on without a worker."""
    return FAULT_TOLERANT in OptionFactory(config["allow_targets"]).of("topology", config["topology"]).supports


def real_job_size(config: Mapping[str, Any], where: Launch) -> int | None:
    """The same of a run that is real; None in virtual time, which needs no hosts."""
    return None if is_virtual(config) else job_size(config, where)


def check_nodes(where: Launch, size: int) -> None:
    """Raises AshlError naming the hosts that could not take part in a job of this size."""
    with connect_nodes(where, assign_slots(where.hosts, size)) as (connections, inbox):
        await_greetings(connections, inbox, InterruptRequest(), where.python)


class Report:
    """What the user sees of what the ranks say: all of rank 0, of the others their errors, once where they all say the
    same. Their last sentences are held back: rank 0 may say it better."""

    def __init__(self, verbose: bool) -> None:
        self.verbose, self.ending = verbose, False
        self.complaints: set[str] = set()
        self.lines: Counter[int] = Counter()  # of complaints that were shown, by rank
        self.sentences: dict[str, str] = {}  # of other ranks: what, and who said so first

    def show(self, name: str, rank: int, text: str, error: bool) -> None:
        last = error and text.startswith("ashl: ")
        if self.verbose and rank:
            write(sys.stderr, f"{name} r{rank} | {text}")
        elif last and rank:
            self.sentences.setdefault(text, f"{name} r{rank}")
        elif not error and not rank:
            write(sys.stdout, text)
        elif last or (error and not self.ending and text not in self.complaints):  # who is interrupted may complain
            self.complaints.add(text)
            self.lines[rank] += 1
            text = "... (--verbose shows all)" if rank and self.lines[rank] == MAX_LINES else text
            if not rank or self.lines[rank] <= MAX_LINES:
                write(sys.stderr, f"{name} r{rank} | {text}" if rank else text)

    def close(self) -> bool:
        """Show what was held back; returns whether any rank has said what went wrong."""
        for text, who in self.sentences.items():
            if text not in self.complaints:
                write(sys.stderr, f"{who} | {text}")
        return bool(self.sentences) or any(text.startswith("ashl: ") for text in self.complaints)


def write(stream: TextIO, text: str) -> None:
    stream.write(f"{text}\n")
    stream.flush()


def supervise_nodes(
    connections: Sequence[Connection], inbox: Inbox, interrupt: InterruptRequest, report: Report, may_lose: bool
) -> int:
    """Until every host is done; the first failure anywhere ends the job everywhere, in order."""
    failure: Failure | None = None
    asked_at, pulse_at = None, 0.0
    while any(connection.open for connection in connections):
        now = time.monotonic()
        if interrupt.times > 1 or (asked_at is not None and now - asked_at > GRACE_S + SETTLE_S):
            broadcast(connections, KILL)
            break
        if asked_at is None and (interrupt.times or (failure is not None and now - failure.at > SETTLE_S)):
            asked_at, report.ending = now, True
            broadcast(connections, STOP)
        if now - pulse_at > PULSE_S:
            pulse_at = now
            broadcast(connections, PULSE)
        if (found := next_line(inbox, 0.1)) and (wrong := handle_output(found, report, may_lose)) and failure is None:
            failure = wrong
    explained = report.close()
    if interrupt.times:
        return 130
    if failure is None:
        return 0
    if not explained:
        raise (UsageError if failure.code == 2 else AshlError)(failure.sentence)
    return failure.code


def handle_output(found: OutputLine, report: Report, may_lose: bool) -> Failure | None:
    """Show what a host says; returns what has gone wrong there, if something has that ends the job."""
    connection, line, error = found
    name, now = connection.name, time.monotonic()
    if line is None:
        connection.open = False
        if not connection.running:
            return None
        if may_lose and HOME not in connection.running:  # whether the run goes on without it, home says
            names = ", ".join(f"rank {rank}" for rank in sorted(connection.running))
            connection.running.clear()
            write(sys.stderr, f"ashl: {name} {LOST}, with {names}")
            return None
        words = connection.last_words or "the connection has ended"
        return Failure(1, f"{name} {LOST} ({words}); what ran there ends by itself within {SILENCE_S:g} s", now)
    try:
        record = AgentRecord() if error else AgentRecord.model_validate_json(line)
    except ValidationError:
        error, record = True, AgentRecord()
    if error:
        connection.words.append(line)
    for text, is_error in ((record.out, False), (record.err, True)):
        if text is not None:
            report.show(name, record.rank, printable(text), is_error)
    if record.failed is not None:
        connection.running.clear()
        return Failure(2, f"{name}: {plain(record.failed)}; name a folder that every host has by --folder", now)
    if record.code is None:
        return None
    connection.running.discard(record.rank)
    if record.code == 0:
        return None
    if may_lose and record.rank != HOME and (record.code < 0 or record.code == EXIT_EVICTED):  # likewise
        write(sys.stderr, f"ashl: rank {record.rank} on {name} {describe_exit(record.code)}")
        return None
    what = f"rank {record.rank} on {name} {describe_exit(record.code)}"
    return Failure(record.code if record.code in CODES else 1, what, now)


def fetch_run_folder(where: Launch, run_dir: Path) -> bool:
    """Bring the files of a run folder here from the first host, which keeps the records; whether there were any.
    Nothing but plain files of the folder itself is taken."""
    there, count = str(Path(where.folder, run_dir)), 0
    remote = command(where, where.hosts[0], ["tar", "-C", there, "-cf", "-", "."])
    process = subprocess.Popen(remote, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    with process, suppress(tarfile.TarError), tarfile.open(fileobj=process.stdout, mode="r|") as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isfile() else None
            if content is not None and "/" not in (name := member.name.removeprefix("./")):
                run_dir.joinpath(name).write_bytes(content.read())
                count += 1
    return count > 0


def broadcast(connections: Sequence[Connection], line: bytes) -> None:
    for connection in connections:
        connection.send(line)
