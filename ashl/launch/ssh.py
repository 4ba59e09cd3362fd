"""A loop over `ssh HOST`: one connection per process, for users who have no other engine.

Each connection runs a script of the shell, over ssh, which reads the user's configuration, or
directly for `localhost`. The script says that ashl is there, reads the environment from its input,
and starts its process. At the end of its input it ends the process as Ctrl-C does, so that none
outlives the launcher. No process starts before all hosts have answered.
"""

import asyncio
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from shlex import join, quote
from typing import Any

from ashl.config.signals import INTERRUPTS
from ashl.errors import AshlError, UsageError, plain
from ashl.launch.job import EVICTED, Launch, Machine, Task, is_loopback, random_port

SCRIPT = (
    'exec 3<&0; {python} -P -c "import ashl" || exit; echo "ashl is there $SSH_CONNECTION"; '
    'read -r line <&3 && eval "$line" && cd {folder} || exit 2; '
    # the shell itself would say that its process was killed
    "exec 4>&2 2>/dev/null; {command} </dev/null 3<&- 2>&4 4>&- & rank=$!; exec 4>&-; "
    'trap "kill -TERM $rank" TERM HUP INT; '
    "(cat <&3; kill -TERM $rank; sleep {grace_s} & s=$!; "
    'trap "kill $s; exit" TERM; wait $s; kill -KILL $rank) >/dev/null & '
    "wait $rank; code=$?; kill $!; exit $code"
)
GREETING = re.compile(r"ashl is there(?: (\S+) \S+ (\S+) \S+)? *")
ANSWER_S = 60.0  # seconds for a host to answer, perhaps from a slow disk
GRACE_S = 15.0  # seconds between SIGTERM and SIGKILL; a run finishes its records
# seconds after the first failure in which other ranks can notice it and finish their records
SETTLE_S = 5.0
TICK_S = 0.5
TOGETHER = 8  # connections that one host authenticates at a time; sshd refuses more than 10
UNREACHED, LOST = "does not answer", "failed during the run"
OPTIONS = (
    "BatchMode=yes",
    "ControlMaster=no",
    "ConnectTimeout=10",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=3",
)
DISCONNECTED = 255  # exit code of ssh itself
CODES = (1, 2, 3, 130)  # exit codes of an ashl command that did not succeed


@dataclass
class Connection:
    """A connection to the host of a task."""

    task: Task
    process: Process
    answered: bool = False
    seen_from: str | None = None  # address of the launcher as the host sees it
    reached_at: str | None = None  # address at which ssh reached the host
    words: list[str] = field(default_factory=list)  # lines of errors, and of a login shell

    @property
    def name(self) -> str:
        return self.task.machine.name

    @property
    def input(self) -> asyncio.StreamWriter:
        assert self.process.stdin is not None
        return self.process.stdin

    @property
    def last_words(self) -> str:
        return next((plain(text) for text in reversed(self.words) if text.strip()), "")


def tasks(launch: Launch) -> list[Task]:
    """Return the process of each rank, with torchrun's variables."""
    found = []
    for group, share in enumerate(launch.hosts):
        for local, rank in enumerate(share.ranks):
            own = {"RANK": rank, "WORLD_SIZE": launch.size, "GROUP_RANK": group}
            own |= {"LOCAL_RANK": local, "LOCAL_WORLD_SIZE": len(share.ranks)}
            env = {name: str(value) for name, value in own.items()}
            found.append(Task(share.machine, rank, tuple(launch.rank_command), env))
    return found


def command(launch: Launch, machine: Machine, script: str) -> list[str]:
    """Return the command line that runs a script on a host: by ssh, or directly for `localhost`.

    If an option is given twice, ssh uses the first value, which is the user's.
    """
    if machine.login == "localhost":
        return ["sh", "-c", script]
    options = [word for option in OPTIONS for word in ("-o", option)]
    return [*launch.ssh, "-T", *options, machine.login, f"exec sh -c {quote(script)}"]


def task_command(launch: Launch, task: Task) -> list[str]:
    """Return the command line that starts a task; its input brings the job's environment."""
    env = {**task.env, "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}
    words = ["env", *(f"{name}={value}" for name, value in env.items())]
    script = SCRIPT.format(
        python=quote(launch.python),
        folder=quote(launch.folder),
        command=join([*words, *task.argv]),
        grace_s=int(GRACE_S),
    )
    return command(launch, task.machine, script)


def environment_line(launch: Launch, master: str) -> bytes:
    """Return the line that sets the job's variables, with those of an agent of torchrun.

    Raises: UsageError for a value of several lines.
    """
    port = str(random_port())
    env = {**launch.env, "MASTER_ADDR": master, "MASTER_PORT": port}
    env |= {"PET_MASTER_ADDR": master, "PET_MASTER_PORT": port}
    for name, value in env.items():
        if "\n" in value or not name.isidentifier():
            raise UsageError(f"--env {name}: ssh brings names of variables and values of one line")
    words = [f"{name}={quote(value)}" for name, value in env.items()]
    return f"export {' '.join(words)}\n".encode()


def master_address(first: str, others: Sequence[str | None]) -> str:
    """Return the address at which the other hosts can reach the first host.

    It is `first`, at which the launcher reached it. If that is loopback, the launcher runs on that
    host: then it is the launcher's address as another host sees it (`others`), or 127.0.0.1.
    """
    if not is_loopback(first):
        return first
    return next(
        (address for address in others if address and not is_loopback(address)), "127.0.0.1"
    )


async def connect(launch: Launch, wanted: Sequence[Task], connections: list[Connection]) -> None:
    """Connect to the hosts of these tasks, and wait for their answers.

    Raises: AshlError that names each host that cannot take part, with the reason; UsageError if
    ssh cannot be started.
    """
    together = defaultdict[Machine, asyncio.Semaphore](lambda: asyncio.Semaphore(TOGETHER))

    async def start(task: Task) -> None:
        argv = task_command(launch, task)
        async with together[task.machine]:
            try:
                process = await asyncio.create_subprocess_exec(
                    *argv, stdin=PIPE, stdout=PIPE, stderr=PIPE, limit=1 << 20, process_group=0
                )
            except OSError as error:
                raise UsageError(f"--ssh {argv[0]}: {error.strerror}") from error
            connections.append(connection := Connection(task, process))
            with suppress(TimeoutError):
                await asyncio.wait_for(await_answer(connection), ANSWER_S)

    found = await asyncio.gather(*map(start, wanted), return_exceptions=True)
    for error in found:
        if isinstance(error, BaseException):
            raise error
    connections.sort(key=lambda connection: connection.task.rank)
    faults = {
        f"{connection.name} {UNREACHED} ({connection.last_words or 'no error'})": None
        for connection in connections
        if not connection.answered
    }
    if faults:
        raise AshlError(
            f"{', '.join(faults)}; `ssh HOST {launch.python} -m ashl.cli` has to work without a"
            " question, or name another Python by --python"
        )


async def await_answer(connection: Connection) -> None:
    """Read a connection's output until the answer of its script; at its end read its errors."""
    process = connection.process
    assert process.stdout is not None
    assert process.stderr is not None
    async for line in process.stdout:
        if found := GREETING.fullmatch(printable(line)):
            connection.answered = True
            connection.seen_from, connection.reached_at = found.groups()
            return
        connection.words.append(printable(line))  # a login shell may print a message of the day
    connection.words += map(printable, (await process.stderr.read()).splitlines())


def printable(line: bytes) -> str:
    """Return a line without control characters, which a terminal might execute as commands."""
    text = line.decode(errors="replace").rstrip("\r\n")
    return "".join(c for c in text if c.isprintable() or c == "\t")


def run(launch: Launch, wanted: Sequence[Task]) -> int:
    """Start all processes, show their output until they have ended, and return the exit code.

    At the first Ctrl-C or SIGTERM the ranks finish their records and exit. At the second one they
    are killed. The exit code is then 130. A rank that is killed or evicted, or whose node fails,
    does not end the job: the controller decides. A failure of rank 0 or of its node, or of an agent
    of torchrun, does.
    Raises: AshlError if a node cannot take part (no rank was started) or fails, with its name.
    """
    return asyncio.run(run_job(launch, wanted))


async def run_job(launch: Launch, wanted: Sequence[Task]) -> int:
    """Run a job as `run` does."""
    connections: list[Connection] = []
    interrupts: list[int] = []
    started = False
    try:
        await connect(launch, wanted, connections)
        for number in INTERRUPTS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                loop = asyncio.get_running_loop()
                loop.add_signal_handler(number, interrupts.append, number)
        first = connections[0]
        elsewhere = [of.seen_from for of in connections if of.name != first.name]
        reached_at = (first.reached_at or first.name) if elsewhere else "localhost"
        line = environment_line(launch, master_address(reached_at, elsewhere))
        started = True
        for connection in connections:
            connection.input.write(line)
        return await supervise(connections, launch.engine == "ssh", interrupts)
    finally:
        for connection in connections:
            connection.input.close()
        limit_s = GRACE_S + SETTLE_S if started and len(interrupts) < 2 else 0.1
        for process in [connection.process for connection in connections]:
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), limit_s)
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)  # with a ProxyCommand of ssh
                await process.wait()


async def watch(connection: Connection, shown: set[str]) -> int:
    """Show the output of a connection until its end, and return its exit code.

    Rank 0: all lines. Other ranks: errors. A sentence of ashl is shown once.
    """
    process, rank = connection.process, connection.task.rank
    label = f"{connection.name} r{rank} | " if rank else ""

    async def show(stream: Any, error: bool) -> None:
        async for line in stream:
            text = printable(line)
            connection.words += [text] if error else []
            if (rank and not error) or text in shown:
                continue
            shown.update([text] if error and (rank or text.startswith("ashl: ")) else [])
            out = sys.stderr if error or rank else sys.stdout
            out.write(f"{label}{text}\n")
            out.flush()

    await asyncio.gather(show(process.stdout, False), show(process.stderr, True))
    return await process.wait()


async def supervise(
    connections: Sequence[Connection], tolerates_failures: bool, interrupts: Sequence[int]
) -> int:
    """Show the output until all tasks have ended, and return the job's exit code.

    After the first failure that is not tolerated, the launcher ends the input of all connections.
    Args: tolerates_failures, True if a killed rank other than rank 0 does not end the job.
    Raises: AshlError with that failure, if no rank has printed an error of ashl.
    """
    clock, shown = asyncio.get_running_loop().time, set[str]()
    pending = {asyncio.create_task(watch(of, shown)): of for of in connections}
    failure: tuple[int, str] | None = None
    stop_s = float("inf")
    while pending and len(interrupts) < 2 and clock() < stop_s + GRACE_S + SETTLE_S:
        done, _ = await asyncio.wait(pending, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            connection, code = pending.pop(task), task.result()
            killed = code < 0 or code == EVICTED or (code > 128 and code != 130)
            # after an interrupt, a rank that has not begun is killed by the signal
            if not code or failure is not None or interrupts:
                continue
            if killed and tolerates_failures and connection.task.rank:
                sys.stderr.write(f"ashl: {describe(connection, code)}\n")
            else:
                failure = code if code in CODES else 1, describe(connection, code)
                stop_s = min(stop_s, clock() + SETTLE_S)
        if interrupts or clock() >= stop_s:
            stop_s = min(stop_s, clock())
            for connection in pending.values():
                connection.input.close()
    if interrupts:
        show_interrupted(shown)
        return 130
    if failure is not None and not any(text.startswith("ashl: ") for text in shown):
        raise (UsageError if failure[0] == 2 else AshlError)(failure[1])
    return failure[0] if failure else 0


def show_interrupted(shown: set[str]) -> None:
    """Print that the job was interrupted, unless rank 0 has printed it."""
    if not any(text.startswith("ashl: interrupted") for text in shown):
        sys.stderr.write("ashl: interrupted\n")


def describe(connection: Connection, code: int) -> str:
    """Return the sentence about a task that ended with this exit code."""
    rank = f"rank {connection.task.rank} on {connection.name}"
    if code == DISCONNECTED:
        return f"{rank} {LOST} ({connection.last_words or 'the connection has ended'})"
    with suppress(ValueError):
        return f"{rank} was killed by {signal.Signals(code - 128 if code > 0 else -code).name}"
    return f"{rank} ended with exit code {code}"
