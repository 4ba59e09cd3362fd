"""Run a command of a foreign job, watch its ranks, and name its straggler."""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import IO, Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ashl.config.signals import handle_signals
from ashl.errors import UsageError, unwritable_path_error
from ashl.tracking.console import number, percent, seconds, table_of
from ashl.tracking.straggler import StragglerFinder, describe_straggler, find_straggler
from ashl.watch.records import Records

HOOK = Path(__file__).parent / "hook"
FOLDER = "ASHL_WATCH"  # environment variable with the folder of the records
SUMMARY = "summary.json"
TICK_S = 0.5
NO_RANK = (
    "ashl: no process of the command has trained with DistributedDataParallel, or its Python did"
    " not import sitecustomize from PYTHONPATH (options -I, -E and -S forbid it)"
)


def watch(command: Sequence[str], folder: Path | None, quiet: bool) -> int:
    """Run a command, show the time of its ranks, and return its exit code.

    Args: folder, for the records and summary.json; None makes one under runs/. quiet, True to show
    neither table nor verdict.
    Raises: UsageError if the command cannot be started or the folder has records.
    """
    folder = make_folder(folder)
    records, finder = Records(folder), StragglerFinder()
    console = Console(stderr=True)
    begin_s = time.monotonic()
    with ExitStack() as stack:
        live = None
        if console.is_interactive and not quiet:
            live = stack.enter_context(Live(console=console, auto_refresh=False, transient=True))
        process = start(command, folder, piped=live is not None)
        stack.enter_context(process)
        stack.enter_context(pass_signals(process))
        copies = [
            threading.Thread(target=copy_lines, args=(stream, console), daemon=True)
            for stream in (process.stdout, process.stderr)
            if stream is not None
        ]
        for copy in copies:
            copy.start()
        ended = False
        while not ended:
            with suppress(subprocess.TimeoutExpired):
                process.wait(TICK_S)
            ended = process.returncode is not None
            records.read()
            found = finder.observe(records.rows(), records.time_s)
            if found and not quiet:
                print_line(console, f"ashl: {describe_straggler(found, 'rank')}")
            if live is not None:
                live.update(frame(records, finder), refresh=True)
        for copy in copies:
            copy.join()
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    summary = summarise(records, command, code, time.monotonic() - begin_s)
    (folder / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")
    if not records.ranks:
        print_line(console, NO_RANK)
    elif not quiet:
        console.print(table_of(columns(records)))
        print_line(console, describe_straggler(summary["straggler"], "rank") or "no straggler")
        print_line(console, f"records  {folder}")
    return code


def make_folder(folder: Path | None) -> Path:
    """Return the folder of the records. Raises UsageError if it has records already."""
    folder = folder or Path("runs") / time.strftime("%Y-%m-%d") / time.strftime("%H-%M-%S-watch")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fix = "name another one with --folder DIR"
        raise unwritable_path_error(f"cannot make the folder {folder}", error, fix) from error
    if (folder / SUMMARY).exists():
        raise UsageError(
            f"--folder {folder}: it has the records of another command; name a new one"
        )
    return folder.absolute()


def start(command: Sequence[str], folder: Path, piped: bool) -> subprocess.Popen[str]:
    """Start the command with the hook in its environment.

    Args: piped, True if its output goes through this process, because a table is on the terminal.
    """
    paths = [str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), FOLDER: str(folder)}
    streams: dict[str, Any] = {}
    if piped:
        env |= {"PYTHONUNBUFFERED": "1"}
        streams = {
            name: subprocess.PIPE
            for name, own in (("stdout", sys.stdout), ("stderr", sys.stderr))
            if own.isatty()
        }
    try:
        return subprocess.Popen(command, env=env, text=True, errors="replace", **streams)
    except OSError as error:
        raise UsageError(
            f"{command[0]} cannot be started ({error.strerror}); give its path, or correct PATH"
        ) from error


def pass_signals(process: subprocess.Popen[str]) -> AbstractContextManager[None]:
    """Pass SIGTERM on to the command, and leave SIGINT to it, which the terminal sends to both."""

    def handle(number: int, frame: object) -> None:
        if number == signal.SIGTERM:
            process.send_signal(number)

    return handle_signals(handle, {signal.SIGINT, signal.SIGTERM})


def copy_lines(stream: IO[str], console: Console) -> None:
    """Print the command's output above the table."""
    for line in stream:
        print_line(console, line.rstrip("\n"))


def print_line(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False, markup=False)


def columns(records: Records) -> dict[str, list[str]]:
    """Return the table of the ranks' time."""
    rows = records.rows()
    whole_s = records.time_s or None
    shares = {
        title: [percent(row[f"{title}_s"] / whole_s if whole_s else None) for row in rows]
        for title in ("compute", "communication", "wait")
    }
    steps = [row["steps"] for row in rows]
    return {
        "rank": [str(row["rank"]) for row in rows],
        "host": [row["host"] for row in rows],
        "steps": [number(count) for count in steps],
        "compute ms/step": [
            number(1e3 * row["compute_s"] / count if count else None)
            for row, count in zip(rows, steps, strict=True)
        ],
        **shares,
    }


def frame(records: Records, finder: StragglerFinder) -> Group:
    """Return the live table."""
    verdict = describe_straggler(finder.found, "rank")
    title = Text(f"ashl watch  {seconds(records.time_s)} of steps recorded", style="bold")
    return Group(title, table_of(columns(records)), Text(verdict, style="yellow"))


def summarise(records: Records, command: Sequence[str], code: int, host_s: float) -> dict[str, Any]:
    """Return the record of summary.json."""
    rows = records.rows()
    return {
        "schema": 1,
        "command": shlex.join(command),
        "exit_code": code,
        "host_s": host_s,
        "time_s": records.time_s,
        "num_ranks": records.world_size,
        "steps": max((row["steps"] for row in rows), default=0),
        "ranks": rows,
        "straggler": find_straggler(rows, records.time_s),
    }
