"""Run jobs in processes of their own, a fixed number at a time; a process that dies affects no
other run.
"""

import json
import multiprocessing as mp
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ashl.errors import AshlError
from ashl.run.launch import allow_children, start_fork_server
from ashl.run.launcher_env import clear_launcher_env
from ashl.run.multi_node import LOST, UNREACHED, Launch, fetch_run_folder, real_job_size, run_job
from ashl.run.process_setup import die_with_parent, redirect
from ashl.run.supervisor import KILLED_BY
from ashl.run.train import train
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


@dataclass(frozen=True)
class Job:
    """One run to start or to resume."""

    folder: Path
    config: dict[str, Any]
    overrides: tuple[str, ...]
    resume: bool = False  # resume from the run's checkpoint


def here(job: Job) -> int:
    """Run the job in this process and return its exit code."""
    resume = job.folder if job.resume else None
    return train(
        job.config, list(job.overrides), quiet=True, silent=True, resume=resume, strict=False
    )


def on_hosts(job: Job, where: Launch, config_dir: Path | None) -> int:
    """Run the job on the hosts, if it is a real run, fetch its records, and return its exit
    code.
    """
    size = real_job_size(job.config, where)
    if size is None:
        return here(job)
    own = {
        "run.dir": str(job.folder),
        "run.save_weights": job.config["run"]["save_weights"],
        "tracking.sink": "none",
    }
    options = ["--quiet", *(["--config-dir", str(config_dir)] if config_dir else [])]
    argv = [
        "train",
        *options,
        *job.overrides,
        *(f"{key}={json.dumps(value)}" for key, value in own.items()),
    ]
    code = run_job(where, size, argv)
    if (
        not (job.folder / SUMMARY).exists()
        and not fetch_run_folder(where, job.folder)
        and code == 0
    ):
        raise AshlError(
            f"the records of this run are not on {where.hosts[0].name}, in {where.folder}, either"
        )
    return code


def run_all(
    slots: int,
    jobs: Sequence[Job],
    show: Callable[[list[Job]], None],
    unwanted: Callable[[Job], bool] = lambda job: False,
    run: Callable[[Job], int] = here,
) -> Iterator[Job]:
    """Run every job, `slots` at a time, in order, and yield each as it ends.

    Each job has a process, in which `run` brings it to its end. `show` is called a few times a
    second with the jobs in progress. A job that is then `unwanted` is not begun, or is asked to
    exit in order. On an interrupt, or when the caller closes the generator, the jobs in progress
    first exit in order.
    """
    context: Any = mp.get_context("forkserver")
    start_fork_server("ashl.study.slots")
    waiting, running = list(reversed(jobs)), dict[Any, tuple[Job, BaseProcess]]()
    stopped: set[Any] = set()
    try:
        while waiting or running:
            while waiting and len(running) < slots:
                job = waiting.pop()
                if unwanted(job):
                    continue
                process = context.Process(target=play, args=(job, run), name=job.folder.name)
                with allow_children():
                    process.start()
                running[process.sentinel] = (job, process)
            for sentinel in wait(list(running), timeout=POLL_S):
                job, process = running.pop(sentinel)
                process.join()
                if sentinel not in stopped:
                    record_end(job, process.exitcode or 0)
                yield job
            show([job for job, _ in running.values()])
            for sentinel in [
                s for s, (job, _) in running.items() if s not in stopped and unwanted(job)
            ]:
                running[sentinel][1].terminate()
                stopped.add(sentinel)
    finally:
        stop([process for _, process in running.values()])


def stop(processes: Sequence[BaseProcess]) -> None:
    """Ask the processes to exit, and kill those that do not."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(LEAVE_S)
        if process.is_alive():
            process.kill()
            process.join()


def play(job: Job, run: Callable[[Job], int]) -> None:
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


def record_end(job: Job, code: int) -> None:
    """Write a summary for a process that was killed or failed before it could write one."""
    if code < 0:
        record_failure(job, f"{KILLED_BY} {signal.Signals(-code).name}")
    elif code and code != 130:
        record_failure(job, f"ended with exit code {code}; its output is in {job.folder / LOG}")


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Return the summary of a run that has ended; None if there is none, or a damaged one."""
    summary = jsonl.whole(folder / SUMMARY)
    return summary if summary is not None and "status" in summary else None


def by_itself(summary: dict[str, Any]) -> bool:
    """Return True if a run has ended by itself, and not by an interrupt, a kill or a full disk."""
    reason = str(summary.get("exit_reason"))
    return summary["status"] in ENDED and not any(cause in reason for cause in FROM_OUTSIDE)


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
