"""Run jobs in processes of their own, on this machine or in a queue by submitit.

A process that dies affects no other run. A job in a queue has a permit: a file in a folder of its
batch. The job removes its permit when it has ended. If the sweep removes it, the job exits in
order, or does not begin when its turn comes. So the jobs of a resumed sweep never meet the jobs of
the sweep before.
"""

import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from multiprocessing.connection import wait
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

from ashl.config.signals import KILLED_BY, describe_exit
from ashl.errors import AshlError, UsageError
from ashl.launch.environment import clear_launcher_env
from ashl.launch.job import Launch, job_size
from ashl.launch.ssh import LOST, UNREACHED, command
from ashl.launch.start import start
from ashl.run.launch import start_child
from ashl.run.process_setup import die_with_parent, redirect
from ashl.run.train import is_virtual, run
from ashl.runtime.rank_checkpoint import list_checkpoints
from ashl.tracking import jsonl
from ashl.tracking.recorder import SUMMARY, UNWRITABLE

LOG = "output.log"
GONE = "its process ended without a message"
ENDED = ("finished", "diverged", "failed")  # states of runs that do not run again
FROM_OUTSIDE = (
    UNWRITABLE,
    GONE,
    UNREACHED,
    LOST,
    *(f"{KILLED_BY} SIG{name}" for name in ("KILL", "TERM", "INT", "HUP")),
)
LEAVE_S = 20.0  # seconds that runs have to exit in order after an interrupt
POLL_S = 0.25
PREFIX = "launcher-"  # begins the name of a batch's folder in the sweep's folder
LAUNCHERS = ("submitit_slurm", "submitit_local")
TIMEOUT_MIN = 60  # minutes of a job of submitit, unless launcher.timeout_min is given


@dataclass(frozen=True)
class Job:
    """One run to start, or to resume from its checkpoint."""

    folder: Path
    config: dict[str, Any]
    overrides: tuple[str, ...]
    resume: bool = False


class Pool(NamedTuple):
    """Starts jobs, and the number of jobs that may be started and not ended at any time."""

    start: Callable[[Sequence[Job]], Sequence["LocalProcess | QueuedJob"]]
    at_once: int


def run_all(
    pool: Pool,
    jobs: Iterator[Job],
    show: Callable[[list[Job]], None],
    is_unwanted: Callable[[Job], bool] = lambda job: False,
) -> Iterator[Job]:
    """Run every job in order and yield each as it ends.

    The next job is taken when the pool has room for it. `show` is called a few times a second with
    the jobs in progress. A job for which `is_unwanted` is then True is
    not begun, or is asked to exit in order. On an interrupt, or when the caller closes the
    generator, the jobs in progress first exit in order.
    Raises: AshlError if a queue does not take a job.
    """
    started = list[LocalProcess | QueuedJob]()
    try:
        while True:
            wanted = (job for job in jobs if not is_unwanted(job))
            batch = list(islice(wanted, pool.at_once - len(started)))
            started += pool.start(batch) if batch else []
            if not started:
                break
            wait([each.sentinel for each in started if each.sentinel], timeout=POLL_S)
            for each in [each for each in started if each.has_ended()]:
                started.remove(each)
                each.close()
                yield each.job
            show([each.job for each in started if each.is_running()])
            for each in started:
                if is_unwanted(each.job):
                    each.stop()
    finally:
        for each in started:
            each.stop()
        for each in started:
            each.close()


# --- jobs on this machine


def run_here(job: Job) -> int:
    """Run the job in this process and return its exit code."""
    resume = job.folder if job.resume else None
    ran = run(job.config, list(job.overrides), quiet=True, silent=True, resume=resume, strict=False)
    return ran.code


def run_on_hosts(job: Job, launch: Launch, config_dir: Path | None) -> int:
    """Run the job by an engine, if it is a real run, fetch its records, and return its exit
    code.
    """
    size = real_job_size(job.config, launch)
    if size is None:
        return run_here(job)
    own = {
        "run.dir": str(job.folder),
        "run.save_weights": job.config["run"]["save_weights"],
        "tracking.sink": "none",
    }
    quiet = ["--quiet", *(["--config-dir", str(config_dir)] if config_dir else [])]
    settings = [f"{key}={json.dumps(value)}" for key, value in own.items()]
    argv = ("train", *quiet, *job.overrides, *settings)
    own_options = ("--wait",) if launch.engine == "slurm" else ()
    options = (*launch.options, *own_options)
    code = start(replace(launch, size=size, argv=argv, options=options))
    if (job.folder / SUMMARY).exists() or fetch_run_folder(launch, job.folder) or code:
        return code
    raise AshlError(f"the records of this run are not on the first host either, in {launch.folder}")


def real_job_size(config: dict[str, Any], launch: Launch | None) -> int | None:
    """Return `job_size`; None without a launch, and for virtual time, which needs no hosts."""
    return None if launch is None or is_virtual(config) else job_size(config, launch)


def fetch_run_folder(launch: Launch, run_dir: Path) -> bool:
    """Copy the plain files of a run folder from the first host, where the controller runs.

    Returns: True if at least one file was copied.
    """
    if not launch.machines or launch.machines[0].kind:
        return False
    there = quote(str(Path(launch.folder, run_dir)))
    remote = command(launch, launch.machines[0], f"tar -C {there} -cf - .")
    count = 0
    with (
        subprocess.Popen(remote, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process,
        suppress(tarfile.TarError),
        tarfile.open(fileobj=process.stdout, mode="r|") as archive,
    ):
        for member in archive:
            content = archive.extractfile(member) if member.isfile() else None
            if content is not None and "/" not in (name := member.name.removeprefix("./")):
                run_dir.joinpath(name).write_bytes(content.read())
                count += 1
    return count > 0


def local_pool(slots: int, run: Callable[[Job], int] = run_here) -> Pool:
    """Return a pool of processes on this machine, in which `run` brings a job to its end."""
    return Pool(lambda jobs: [LocalProcess(job, run) for job in jobs], slots)


class LocalProcess:
    """A job in a process of this machine."""

    def __init__(self, job: Job, run: Callable[[Job], int]) -> None:
        self.job, self.stopped = job, False
        self.process = start_child("job", run_as_process, (job, run), "ashl.study.jobs")
        self.sentinel = self.process.sentinel

    def is_running(self) -> bool:
        return True

    def has_ended(self) -> bool:
        """Return True if the process has ended; one that failed gets a summary."""
        if self.process.is_alive():
            return False
        self.process.join()
        if not self.stopped:
            record_end(self.job, self.process.exitcode or 0)
        return True

    def stop(self) -> None:
        """Ask the process to exit in order."""
        if not self.stopped:
            self.stopped = True
            self.process.terminate()

    def close(self) -> None:
        """Wait for the process, and kill it if it does not exit."""
        self.process.join(LEAVE_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def run_as_process(job: Job, run: Callable[[Job], int]) -> None:
    """Run a job as the main function of its process.

    The process is part of no job of another launcher. It blocks SIGINT and SIGHUP, which the parent
    passes on as SIGTERM.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGINT, signal.SIGHUP})
    die_with_parent()
    clear_launcher_env()
    job.folder.mkdir(parents=True, exist_ok=True)
    redirect(job.folder / LOG)
    code = 1
    try:
        code = run(job)
    except KeyboardInterrupt:
        code = 130
    except AshlError as error:
        sys.stderr.write(f"ashl: {error}\n")
        code = error.exit_code
        record_failure(job, str(error))
    except Exception as error:
        traceback.print_exc()
        record_failure(job, f"{type(error).__name__}: {error}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# --- jobs in a queue


def check_parameters(launcher: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters for an executor of submitit.

    Args: values are those of `launcher.KEY=VALUE`, by key.
    Raises: UsageError for an unknown launcher or key, and if submitit is not installed.
    """
    if launcher not in LAUNCHERS:
        raise UsageError(f"there is no launcher {launcher!r}; take one of {', '.join(LAUNCHERS)}")
    try:
        from submitit import AutoExecutor
    except ImportError:
        raise UsageError(
            f"--launcher {launcher} needs a package: pip install 'ashl[slurm]'"
        ) from None
    cluster = launcher.removeprefix("submitit_")
    found = {f"{cluster}_{key}": value for key, value in values.items()}
    with tempfile.TemporaryDirectory() as folder:
        try:
            AutoExecutor(folder, cluster="debug").update_parameters(**found)
        except NameError as error:
            raise UsageError(f"--launcher {launcher}: {str(error).splitlines()[0]}") from None
    return {f"{cluster}_timeout_min": TIMEOUT_MIN, f"{cluster}_name": "ashl"} | found


def queue_pool(
    folder: Path, launcher: str, parameters: Mapping[str, Any], slots: int | None, default: int
) -> Pool:
    """Return a pool that submits jobs to a queue, with its files in `folder`.

    Args: parameters are those of `check_parameters`; slots is how many jobs run at a time. None =
    as many as the queue of Slurm allows, and else `default`.
    """
    own, in_slurm = {**parameters}, launcher == "submitit_slurm"
    if slots and in_slurm:
        own.setdefault("slurm_array_parallelism", slots)
    start = partial(submit, folder, launcher.removeprefix("submitit_"), own)
    return Pool(start, sys.maxsize if in_slurm else slots or default)


def withdraw_jobs(folder: Path) -> None:
    """Withdraw the jobs of a sweep in this folder that a queue still has, and remove the files of
    all its batches.
    """
    for place in folder.glob(f"{PREFIX}*"):
        shutil.rmtree(place, ignore_errors=True)


@dataclass(frozen=True)
class Task:
    """A job in a queue; submitit calls `checkpoint` before its queue ends the job and requeues
    it.
    """

    job: Job
    permit: Path
    sweep: tuple[str, int]  # host and process of the sweep

    @property
    def mark(self) -> Path:
        """The file that exists while the job runs."""
        return self.permit.with_suffix(".begun")

    def __call__(self) -> None:
        """Run the job to its end, as long as its permit exists."""
        if not self.permit.exists():
            return
        parent = os.getppid()
        clear_remains(self.job.folder)  # the queue may have started this job before
        job = replace(self.job, resume=bool(list_checkpoints(self.job.folder)))

        def is_withdrawn(job: Job) -> bool:
            return not self.permit.exists() or os.getppid() != parent or self.sweep_was_killed()

        self.mark.touch()
        try:
            for _ in run_all(local_pool(1), iter([job]), lambda running: None, is_withdrawn):
                self.permit.unlink(missing_ok=True)
        finally:
            self.mark.unlink(missing_ok=True)

    def sweep_was_killed(self) -> bool:
        """Return True if the process of the sweep was on this host and has ended."""
        host, pid = self.sweep
        return host == socket.gethostname() and not Path(f"/proc/{pid}").exists()

    def checkpoint(self) -> Any:
        """Return what the requeued job calls: the same, which resumes from its checkpoint."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


class QueuedJob:
    """A job that a queue has received; `submitted` is submitit's handle of it."""

    sentinel = None

    def __init__(self, job: Job, task: Task, submitted: Any) -> None:
        self.job, self.task, self.submitted = job, task, submitted
        self.cancelled = False  # True if it was removed from the queue before it began

    def is_running(self) -> bool:
        return self.task.mark.exists()

    def has_ended(self) -> bool:
        """Return True if the job has ended; a job that died gets a summary."""
        if not self.task.permit.exists() and not self.is_running():
            return True
        if not self.submitted.done():
            return False
        record_failure(self.job, f"{GONE} (submitit: {self.submitted.state.lower()})")
        self.task.permit.unlink(missing_ok=True)
        self.task.mark.unlink(missing_ok=True)
        return True

    def stop(self) -> None:
        """Withdraw the permit, and remove a job that waits from the queue."""
        if self.task.permit.exists():
            self.task.permit.unlink(missing_ok=True)
            if not self.is_running():
                self.cancelled = True
                self.submitted.cancel(check=False)

    def close(self) -> None:
        """Wait until the job has exited."""
        end_s = time.monotonic() + LEAVE_S
        while not (self.cancelled or self.submitted.done()) and time.monotonic() < end_s:
            time.sleep(POLL_S)


def submit(
    folder: Path, cluster: str, parameters: Mapping[str, Any], jobs: Sequence[Job]
) -> list[QueuedJob]:
    """Submit jobs, to Slurm as one array, with files in a folder of their own below `folder`.

    Raises: AshlError if the queue does not take them.
    """
    from submitit import AutoExecutor

    place = Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder.absolute()))
    sweep = (socket.gethostname(), os.getpid())
    tasks = [
        Task(replace(job, folder=job.folder.absolute()), place / f"{number}.permit", sweep)
        for number, job in enumerate(jobs)
    ]
    for task in tasks:
        task.permit.touch()
    logging.getLogger("submitit").setLevel(logging.ERROR)
    # Processes that submitit starts here do not receive the terminal's signals: permits end them.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        executor = AutoExecutor(place / "submitit", cluster=cluster)
        executor.update_parameters(**parameters)
        submitted = executor.submit_array(tasks)
    except Exception as error:  # any error of submitit or of the queue's commands
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise AshlError(
            f"--launcher submitit_{cluster}: the queue did not take {len(jobs)} runs ({reason});"
            " mend the cause, and the same command runs them"
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return [QueuedJob(*each) for each in zip(jobs, tasks, submitted, strict=True)]


# --- the records of a job


def record_end(job: Job, code: int) -> None:
    """Write a summary for a process that was killed or failed before it could write one."""
    if code < 0:
        record_failure(job, describe_exit(code))
    elif code and code != 130:
        record_failure(job, f"ended with exit code {code}; its output is in {job.folder / LOG}")


def record_failure(job: Job, reason: str) -> None:
    """Write a summary for a run that could not write one, so that the record of the sweep is
    complete.
    """
    if not (job.folder / SUMMARY).exists():
        with suppress(OSError):
            job.folder.mkdir(parents=True, exist_ok=True)
            record = {
                "schema": 1,
                "status": "failed",
                "exit_reason": reason,
                "seed": job.config["seed"],
            }
            jsonl.write_json(job.folder / SUMMARY, record)


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Return the summary of a run that has ended; None if there is none, or a damaged one."""
    summary = jsonl.read_json(folder / SUMMARY)
    return summary if summary is not None and "status" in summary else None


def has_ended_by_itself(summary: dict[str, Any]) -> bool:
    """Return True if a run has ended by itself, and not by an interrupt, a kill or a full disk."""
    reason = str(summary.get("exit_reason"))
    return summary["status"] in ENDED and not any(cause in reason for cause in FROM_OUTSIDE)


def has_ended(folder: Path, rerun_failed: bool = False) -> bool:
    """Return True if this run need not run again."""
    summary = read_summary(folder)
    return (
        summary is not None
        and has_ended_by_itself(summary)
        and not (rerun_failed and summary["status"] != "finished")
    )


def clear_remains(folder: Path) -> None:
    """Remove the remains of a run that was killed, unless it can resume from a checkpoint."""
    if has_ended(folder) or not list_checkpoints(folder):
        shutil.rmtree(folder, ignore_errors=True)
