"""Count the path of one gradient through the code: `python -m tests.benchmarks.gradient_path
[--processes]`.

The run has one worker and a server: `sync=asp topology=parameter_server compression=topk`. The path
is one round after the first, from the start of a gradient to the start of the next one. By then the
worker has the reply, and the server has applied the update. The figures are calls of Python
functions of `ashl/` and `cli/`, their files, and the changes of file along the calls of each
thread. With `--processes` the same is counted on real processes, for worker and server together.
Calls of background threads in that window, for example heartbeats, are part of it.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

# Gradients that are computed before the counted path begins; the first ones still set up.
BEFORE = 3
TYPED = (
    "sync=asp",
    "topology=parameter_server",
    "compression=topk",
    "cluster.compute=[1]",
    "model.hidden=[8]",
)
TYPED += ("stop.steps=8", "tracking=none")
# Environment variable: the folder that each process writes its calls into.
LOGS = "ASHL_GRADIENT_PATH"
# a sitecustomize.py
SITE = "from tests.benchmarks.gradient_path import watch_process\nwatch_process()\n"
PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("ashl", "cli"))


class Call(NamedTuple):
    """A call of an own function."""

    time_ns: int
    process: int
    thread: int
    file: str
    begins: bool  # True if a worker begins to compute a gradient with it


class Count(NamedTuple):
    """Files, calls and changes of file on the path. A change of file is counted within its thread."""

    files: int
    calls: int
    changes: int
    threads: int
    processes: int


def own(file: str) -> bool:
    return (
        any(name in file for name in PACKAGES)
        and "site-packages" not in file
        and f"{os.sep}tests{os.sep}" not in file
    )


def recorder(keep: Callable[[Call], object]) -> Callable[[FrameType, str, Any], None]:
    """Return a profile function that keeps each call of an own function."""

    def called(frame: FrameType, event: str, _: Any) -> None:
        code, caller = frame.f_code, frame.f_back
        if event != "call" or not own(code.co_filename):
            return
        computes = code.co_filename.endswith("learner.py") and code.co_name.startswith("gradient")
        begins = computes and caller is not None and caller.f_code.co_filename != code.co_filename
        keep(
            Call(time.monotonic_ns(), os.getpid(), threading.get_ident(), code.co_filename, begins)
        )

    return called


def watch_process() -> None:
    """Write each call of this process and of those that it forks into the folder of LOGS."""
    folder = Path(os.environ[LOGS])

    def write(call: Call) -> None:
        with (folder / str(call.process)).open("a") as file:
            file.write("\t".join(map(str, call)) + "\n")

    profile = recorder(write)
    threading.setprofile(profile)
    sys.setprofile(profile)


def in_virtual_time() -> list[Call]:
    """Return the calls of a run in virtual time, planning excluded."""
    from tests import support

    plan, calls = support.planned(*TYPED), list[Call]()
    sys.setprofile(recorder(calls.append))
    try:
        support.run(plan)
    finally:
        sys.setprofile(None)
    return calls


def on_processes() -> list[Call]:
    """Return the calls of a run on a worker's and a server's process, and of the controller's."""
    with tempfile.TemporaryDirectory() as name:
        place, logs = Path(name), Path(name) / "logs"
        logs.mkdir()
        (place / "sitecustomize.py").write_text(SITE)
        paths = os.pathsep.join([str(place), str(Path(__file__).parents[2])])
        command = [
            sys.executable,
            "-m",
            "ashl",
            "train",
            "-q",
            "runtime=local",
            f"run.dir={place / 'run'}",
            *TYPED,
        ]
        env = os.environ | {LOGS: str(logs), "PYTHONPATH": paths}
        subprocess.run(command, env=env, check=True, timeout=300)
        rows = [
            line.split("\t") for file in logs.iterdir() for line in file.read_text().splitlines()
        ]
    calls = [
        Call(int(at), int(pid), int(thread), file, begins == "True")
        for at, pid, thread, file, begins in rows
    ]
    return sorted(calls)


def path_of(calls: Sequence[Call], *, all_processes: bool = True) -> Count:
    """Count the calls of one round.

    Args: all_processes is False to count the worker's process alone.
    """
    starts = [call for call in calls if call.begins]
    first, after = starts[BEFORE], starts[BEFORE + 1]
    window = [call for call in calls if first.time_ns <= call.time_ns < after.time_ns]
    # The controller keeps records and is not on the path: of other processes, the server's calls
    # the codec.
    takes_part = {call.process for call in window if f"{os.sep}compression{os.sep}" in call.file}
    taken = {first.process} | (takes_part if all_processes else set())
    return counted([call for call in window if call.process in taken])


def counted(calls: Sequence[Call]) -> Count:
    by_thread = dict[tuple[int, int], list[str]]()
    for call in calls:
        by_thread.setdefault((call.process, call.thread), []).append(call.file)
    changes = sum(
        before != after for files in by_thread.values() for before, after in pairwise(files)
    )
    processes = {call.process for call in calls}
    return Count(
        len({call.file for call in calls}), len(calls), changes, len(by_thread), len(processes)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", action="store_true", help="count on real processes, too")
    asked = parser.parse_args()
    rows = [("virtual time", path_of(in_virtual_time()))]
    if asked.processes:
        calls = on_processes()
        rows.append(("processes, worker alone", path_of(calls, all_processes=False)))
        rows.append(("processes, worker and server", path_of(calls)))
    print(f"{'kernel':30}" + "".join(f"{name:>11}" for name in Count._fields))
    for name, count in rows:
        print(f"{name:30}" + "".join(f"{value:11}" for value in count))


if __name__ == "__main__":
    main()
