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
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from shlex import join, quote
from typing import Any

from ashl.config.signals import describe_exit, handle_signals
from ashl.errors import AshlError, UsageError
from ashl.launch.environment import LOCAL, is_loopback
from ashl.launch.job import Launch, Machine, Task, random_port

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
# with the address at which ssh reached the host
GREETING = re.compile(r"ashl is there(?: \S+ \S+ (\S+) \S+)? *")
ANSWER_S = 60.0  # seconds for a host to answer, perhaps from a slow disk
GRACE_S = 15.0  # seconds between SIGTERM and SIGKILL; a run finishes its records
SETTLE_S = 5.0  # seconds after the first failure, in which other ranks finish their records
LAST_S = 30.0  # seconds for the other ranks to end after rank 0, which has the run's records
TOGETHER = 8  # connections that begin at a time; an sshd refuses more than 10
UNREACHED, LOST = "does not answer", "failed during the run"
OPTIONS = "-T -o BatchMode=yes -o ControlMaster=no -o ConnectTimeout=10 -o ServerAliveInterval=5"
DISCONNECTED = 255  # exit code of ssh itself


@dataclass
class Connection:
    """A connection to the host of a task."""

    task: Task
    process: Any  # a process of asyncio, with pipes
    address: str | None = None  # the address of the host, once it has answered
    last_words: str = ""  # the latest line of its errors, or of a login shell

    @property
    def name(self) -> str:
        return self.task.machine.name


def tasks(launch: Launch) -> list[Task]:
    """Return the process of each rank, with torchrun's variables."""
    found = []
    for share in launch.hosts:
        for local, rank in enumerate(share.ranks):
            env = {"RANK": f"{rank}", "WORLD_SIZE": f"{launch.size}"}
            env |= {"LOCAL_RANK": f"{local}", "LOCAL_WORLD_SIZE": f"{len(share.ranks)}"}
            found.append(Task(share.machine, rank, tuple(launch.rank_command), env))
    return found


def command(launch: Launch, machine: Machine, script: str) -> list[str]:
    """Return the command line that runs a script on a host: by ssh, or directly for `localhost`.

    If an option is given twice, ssh uses the first value, which is the user's.
    """
    if machine.login == LOCAL:
        return ["env", "-u", "SSH_CONNECTION", "sh", "-c", script]  # that of this shell, if any
    return [*launch.ssh, *OPTIONS.split(), machine.login, f"exec sh -c {quote(script)}"]


def task_command(launch: Launch, task: Task) -> list[str]:
    """Return the command line that starts a task; its input brings the job's environment."""
    words = ["env", *(f"{name}={value}" for name, value in task.env.items()), *task.argv]
    known = {"python": quote(launch.python), "folder": quote(launch.folder), "command": join(words)}
    return command(launch, task.machine, SCRIPT.format(**known, grace_s=int(GRACE_S)))


def environment_line(launch: Launch, addresses: Sequence[str]) -> bytes:
    """Return the line that sets the job's variables, with those of an agent of torchrun.

    Args: addresses, of the hosts; the first one is the master's, unless --env names another.
    Raises: UsageError for a value of several lines, or if other hosts cannot reach the master.
    """
    alone = len({*addresses}) == 1
    first = "127.0.0.1" if alone or is_loopback(addresses[0]) else addresses[0]
    env = {"MASTER_ADDR": first, "MASTER_PORT": str(random_port()), **launch.env}
    master = env["MASTER_ADDR"]
    if is_loopback(master) and not (alone or all(map(is_loopback, addresses))):
        raise UsageError(
            f"other hosts cannot reach the first one at {master}; name it by an address in the"
            " hosts file, or add --env MASTER_ADDR=ADDRESS"
        )
    env |= {"PET_MASTER_ADDR": master, "PET_MASTER_PORT": env["MASTER_PORT"]}
    env |= {"PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}
    for name, value in env.items():
        if "\n" in value or not name.isidentifier():
            raise UsageError(f"--env {name}: ssh brings names of variables and values of one line")
    return f"export {' '.join(f'{name}={quote(value)}' for name, value in env.items())}\n".encode()


async def run(launch: Launch, wanted: Sequence[Task]) -> int:
    """Start all processes, show their output until they have ended, and return the exit code.

    At the first Ctrl-C or SIGTERM the ranks finish their records and exit. At the second one they
    are killed. The exit code is then 130. A rank that is killed or evicted, or whose node fails,
    does not end the job: the controller decides. A failure of rank 0 or of its node does.
    Raises: AshlError if a node cannot take part (no rank was started) or fails, with its name.
    """
    connections: list[Connection] = []
    interrupts: list[int] = []
    try:
        await connect(launch, wanted, connections)
        line = environment_line(launch, [str(connection.address) for connection in connections])
    except BaseException:
        await end_connections(connections)
        raise
    with handle_signals(lambda number, _: interrupts.append(number)):
        try:
            for connection in connections:
                connection.process.stdin.write(line)
            return await supervise(connections, interrupts)
        finally:
            await end_connections(connections)


async def end_connections(connections: Sequence[Connection]) -> None:
    """Kill the connections that are open. At the end of its input a script ends its process."""
    for process in [connection.process for connection in connections]:
        process.stdin.close()
        if process.returncode is None:
            with suppress(ProcessLookupError):  # it has just ended
                os.killpg(process.pid, signal.SIGKILL)  # with a ProxyCommand of ssh
        await process.wait()


async def connect(launch: Launch, wanted: Sequence[Task], connections: list[Connection]) -> None:
    """Connect to the hosts of these tasks, and wait for their answers.

    Raises: AshlError that names each host that cannot take part, with the reason; UsageError if
    ssh cannot be started.
    """
    together = asyncio.Semaphore(TOGETHER)

    pipes: Any = {"stdin": PIPE, "stdout": PIPE, "stderr": PIPE, "process_group": 0}

    async def start(task: Task) -> None:
        argv = task_command(launch, task)
        async with together:
            try:
                process: Any = await asyncio.create_subprocess_exec(*argv, **pipes, limit=1 << 20)
            except OSError as error:
                raise UsageError(f"--ssh {argv[0]}: {error.strerror}") from error
            connections.append(connection := Connection(task, process))
            with suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    async for line in process.stdout:
                        if found := GREETING.fullmatch(clean_line(line)):
                            connection.address = found[1] or connection.name
                            return
                        # a login shell may print a message of the day
                        connection.last_words = clean_line(line) or connection.last_words
                    for line in (await process.stderr.read()).splitlines():
                        connection.last_words = clean_line(line) or connection.last_words

    for error in await asyncio.gather(*map(start, wanted), return_exceptions=True):
        if error is not None:
            raise error
    connections.sort(key=lambda connection: connection.task.rank)
    silent = [connection for connection in connections if connection.address is None]
    if faults := {f"{of.name} {UNREACHED} ({of.last_words or 'no error'})": None for of in silent}:
        raise AshlError(
            f"{', '.join(faults)}; `ssh HOST {launch.python} -m ashl.cli` has to work without a"
            " question, or name another Python by --python"
        )


async def show_output(connection: Connection, shown: set[str]) -> int:
    """Show all lines of rank 0 and errors of other ranks, a sentence of ashl once; return the exit
    code.
    """
    process, rank = connection.process, connection.task.rank
    label = f"{connection.name} r{rank} | " if rank else ""

    async def show(stream: asyncio.StreamReader, error: bool) -> None:
        async for line in stream:
            text = clean_line(line)
            connection.last_words = (error and text) or connection.last_words
            if (rank and not error) or text in shown:
                continue
            shown.update([text] if error and (rank or text.startswith("ashl: ")) else [])
            out = sys.stderr if error else sys.stdout
            out.write(f"{label}{text}\n")
            out.flush()

    await asyncio.gather(show(process.stdout, False), show(process.stderr, True))
    return await process.wait()


def clean_line(line: bytes) -> str:
    """Decode a line, without control characters, which a terminal might execute as commands."""
    return "".join(c for c in line.decode(errors="replace") if c.isprintable() or c == "\t")


async def supervise(connections: Sequence[Connection], interrupts: Sequence[int]) -> int:
    """Show the output until all tasks have ended, and return the job's exit code.

    The launcher ends the input of all connections after the first failure that is not tolerated,
    or if a rank does not end soon after rank 0.
    Raises: AshlError with that failure, if no rank has printed an error of ashl.
    """
    clock = asyncio.get_running_loop().time
    shown = set[str]()  # lines that were printed
    pending = {asyncio.create_task(show_output(of, shown)): of for of in connections}
    failed = 0  # exit code of the first failure that is not tolerated
    why = ""
    stop_s = float("inf")  # the time at which the input of all connections ends
    while pending and len(interrupts) < 2 and clock() < stop_s + GRACE_S + SETTLE_S:
        done, _ = await asyncio.wait(pending, timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            connection = pending.pop(task)
            code = task.result()
            killed = code < 0 or (code > 128 and code != 130)
            if not code and not connection.task.rank:
                stop_s = min(stop_s, clock() + LAST_S)
            # after an interrupt, a rank that has not begun is killed by the signal
            if not code or failed or interrupts:
                continue
            # an agent of torchrun is no rank: the others would wait for it for minutes
            if killed and connection.task.rank and "RANK" in connection.task.env:
                sys.stderr.write(f"ashl: {describe(connection, code)}\n")
            else:
                failed = code if code in (1, 2, 3, 130) else 1
                why = describe(connection, code)
                stop_s = clock() + SETTLE_S
        stop_s = min(stop_s, clock()) if interrupts else stop_s
        for connection in pending.values() if clock() >= stop_s else ():
            connection.process.stdin.close()
    errors = [text for text in shown if text.startswith("ashl: ")]
    if interrupts:
        if not any(text.startswith("ashl: interrupted") for text in errors):
            sys.stderr.write("ashl: interrupted\n")
        return 130
    if failed and not errors:
        raise (UsageError if failed == 2 else AshlError)(why)
    return failed


def describe(connection: Connection, code: int) -> str:
    """Return the sentence about a task that ended with this exit code."""
    rank = f"rank {connection.task.rank} on {connection.name}"
    if code == DISCONNECTED:
        return f"{rank} {LOST} ({connection.last_words or 'the connection has ended'})"
    # a shell reports a signal as 128 + its number
    killed = 128 < code <= 128 + max(signal.valid_signals())
    return f"{rank} {describe_exit(128 - code if killed else code)}"
