"""Run jobs by a launcher: in other processes, or on the machines of a cluster's queue.

Each job has a file in the launcher's folder, and that file is its permission to run. A job removes
its file when it has ended. If the sweep removes the file, the job ends, or does not begin when its
turn comes. So no queue has to be queried, and the jobs of a resumed sweep never meet the jobs of
the sweep before.
"""

import json
import multiprocessing as mp
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen, TimeoutExpired
from typing import Any

from ashl.errors import AshlError
from ashl.runtime.rank_checkpoint import list_checkpoints
from ashl.study.slots import GONE, LEAVE_S, LOG, POLL_S, Job, record_failure, run_all

PREFIX = "launcher-"
MARGIN_S = 5.0  # seconds for a launcher to notice that all of its jobs have exited
PARENT = os.getppid()

# Returns the command that runs the jobs 0 to n − 1 of a folder elsewhere.
Launch = Callable[[Path, int], Sequence[str]]


class WithdrawnError(Exception):
    """The sweep has withdrawn this job, or the sweep itself has ended."""


def run_elsewhere(
    folder: Path,
    launch: Launch,
    jobs: Sequence[Job],
    show: Callable[[list[Job]], None],
    unwanted: Callable[[Job], bool] = lambda job: False,
) -> Iterator[Job]:
    """Run the jobs by a launcher in the sweep's folder; otherwise like `slots.run_all`.

    Raises: AshlError if some jobs have never begun.
    """
    waiting = dict(enumerate(jobs))
    if not waiting:
        return
    documents = {name(number): record_of(job) for number, job in waiting.items()}
    with at_work(folder, documents, lambda place: launch(place, len(jobs))) as (place, process):
        ended = False
        while waiting and not ended:
            ended = over(process)
            for number in [number for number, job in waiting.items() if unwanted(job)]:
                (place / name(number)).unlink(missing_ok=True)
            files = set(os.listdir(place))
            for number in [number for number in waiting if name(number) not in files]:
                yield waiting.pop(number)
            show([job for number, job in waiting.items() if begun(number) in files])
        lost = [number for number in waiting if begun(number) not in files]
    for number in waiting.keys() - lost:  # the queue has ended the job
        record_failure(waiting[number], f"{GONE}; what the launcher says is in {place / LOG}")
        yield waiting[number]
    if lost:
        what = f"{len(lost)} of {len(jobs)} runs have not begun ({last_words(place)})"
        raise AshlError(
            f"{what}; the launcher's output is in {place}, and the same command runs what is"
            " missing"
        )
    if not waiting:
        shutil.rmtree(place, ignore_errors=True)


@contextmanager
def at_work(
    folder: Path, documents: Mapping[str, Any], command: Callable[[Path], Sequence[str]]
) -> Generator[tuple[Path, Popen]]:
    """Run a launcher in a process, a session and a folder of its own that contains these documents.

    The documents of an earlier launcher of this sweep are removed first. At the end these documents
    are removed, which withdraws the jobs. The launcher's input is a pipe that closes when the sweep
    ends, even if the sweep is killed.
    """
    for left in folder.glob(f"{PREFIX}*"):
        shutil.rmtree(left, ignore_errors=True)
    place = Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder.absolute()))
    for document, content in documents.items():
        (place / document).write_text(json.dumps(content), encoding="utf-8")
    with (
        open(place / LOG, "wb") as log,
        Popen(
            command(place), stdin=PIPE, stdout=log, stderr=STDOUT, start_new_session=True
        ) as process,
    ):
        try:
            yield place, process
        finally:
            for document in documents:
                (place / document).unlink(missing_ok=True)
            try:
                for _ in range(int(LEAVE_S / POLL_S)):
                    if over(process) or not any(place.glob(begun("*"))):
                        break
                over(process, MARGIN_S)
            finally:
                with suppress(ProcessLookupError):
                    # also ends processes that the launcher has left behind
                    os.killpg(process.pid, signal.SIGTERM)
                if not over(process, MARGIN_S):
                    os.killpg(process.pid, signal.SIGKILL)


def over(process: Popen, timeout_s: float = POLL_S) -> bool:
    """Return True if a process has ended or ends within this time."""
    try:
        process.wait(timeout_s)
    except TimeoutExpired:
        return False
    return True


def play_job(place: Path, number: int) -> None:
    """Run this job in the process that the launcher has started for it."""
    leave = place / name(number)
    if not leave.exists():
        return
    asked = json.loads(leave.read_text(encoding="utf-8"))
    path = Path(asked.pop("folder"))
    resume, mark = bool(list_checkpoints(path)), place / begun(number)
    if mark.exists() and not resume:  # the queue has started it a second time
        shutil.rmtree(path, ignore_errors=True)
    job = Job(path, asked["config"], tuple(asked["overrides"]), resume=resume)
    try:
        run_while(leave, mark, [job], slots=1)
    except WithdrawnError:
        return
    leave.unlink(missing_ok=True)


def run_while(leave: Path, mark: Path, jobs: Sequence[Job], slots: int) -> None:
    """Run these jobs as long as the file `leave` exists; the file `mark` exists while they run.

    Raises: WithdrawnError, after the runs have exited in order.
    """

    def leave_or_go_on(running: list[Job]) -> None:
        if not leave.exists() or os.getppid() != PARENT:
            raise WithdrawnError

    # A worker of joblib has a start method of its own, which a fork server does not know.
    mp.set_start_method("forkserver", force=True)
    mark.touch()
    try:
        for _ in run_all(slots, jobs, leave_or_go_on):
            pass
    finally:
        mark.unlink(missing_ok=True)


def record_of(job: Job) -> dict[str, Any]:
    """Return the content of a job's file."""
    return {"folder": str(job.folder), "config": job.config, "overrides": job.overrides}


def name(number: int | str) -> str:
    return f"{number}.json"


def begun(number: int | str) -> str:
    return f"{number}.begun"


def last_words(place: Path) -> str:
    """Return the last line that a launcher printed; its exception if it ended with one."""
    try:
        lines = (place / LOG).read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        lines = []
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
