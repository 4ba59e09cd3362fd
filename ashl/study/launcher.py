"""Jobs that a launcher brings elsewhere: to other processes, or to the machines of a cluster's
queue.

Each job is a file in a folder of the launcher's, and that file is its leave to run: a job takes its
own file away when it has ended, and if the sweep takes it away, the job ends, wherever it is, or
does not begin when its turn has come. So no queue has to be asked about anything, and a sweep that
is taken up never meets the jobs of the one before.
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
MARGIN_S = 5.0  # what a launcher may take to notice that all of its jobs have left
PARENT = os.getppid()

Launch = Callable[
    [Path, int], Sequence[str]
]  # the command that has the jobs 0 to n - 1 of a folder run elsewhere


class WithdrawnError(Exception):
    """The sweep does not want this job any longer, or is gone."""


def run_elsewhere(
    folder: Path,
    launch: Launch,
    jobs: Sequence[Job],
    show: Callable[[list[Job]], None],
    unwanted: Callable[[Job], bool] = lambda job: False,
) -> Iterator[Job]:
    """As `slots.run_all`, by a launcher in the sweep's folder. Raises AshlError if some jobs have
    never begun.
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
    for number in waiting.keys() - lost:  # it was ended by whoever rules over there
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
    """A launcher in a process, a session and a folder of its own, where these documents are. In the
    end they are withdrawn, and so is before all what an earlier launcher of this sweep may have
    left.

    Its input is a pipe that is closed when the sweep dies, however it dies.
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
                    os.killpg(process.pid, signal.SIGTERM)  # what it may have left behind, too
                if not over(process, MARGIN_S):
                    os.killpg(process.pid, signal.SIGKILL)


def over(process: Popen, timeout_s: float = POLL_S) -> bool:
    """Whether a process has ended, or does so within this time."""
    try:
        process.wait(timeout_s)
    except TimeoutExpired:
        return False
    return True


def play_job(place: Path, number: int) -> None:
    """Run this job, in whatever process the launcher has made for it."""
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
    """Run these as long as the first file is there; the second one is there as long as they run.
    Raises WithdrawnError; the runs have left in order by then.
    """

    def leave_or_go_on(running: list[Job]) -> None:
        if not leave.exists() or os.getppid() != PARENT:
            raise WithdrawnError

    mp.set_start_method(
        "forkserver", force=True
    )  # a worker of joblib has one that a fork server does not know
    mark.touch()
    try:
        for _ in run_all(slots, jobs, leave_or_go_on):
            pass
    finally:
        mark.unlink(missing_ok=True)


def record_of(job: Job) -> dict[str, Any]:
    """What a job's file says."""
    return {"folder": str(job.folder), "config": job.config, "overrides": job.overrides}


def name(number: int | str) -> str:
    return f"{number}.json"


def begun(number: int | str) -> str:
    return f"{number}.begun"


def last_words(place: Path) -> str:
    """What a launcher said last; an exception, where it ended with one."""
    try:
        lines = (place / LOG).read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        lines = []
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
