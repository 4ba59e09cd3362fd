"""A run from a composed configuration to its outcome: plan, run folder, kernel, records, exit code.

`run` compiles the plan, opens the run folder with its records, runs the plan in virtual time or on
processes, and writes the summary. A run resumes from a checkpoint in its own folder. With another
number of workers it resumes in a new folder (`ashl.run.rescaling`).

If another launcher (torchrun, for example) has started this process, `run` joins its job. Then only
the process of rank 0 has the records; the others run their rank and return.
"""

import json
import shlex
import signal
import time
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from rich.console import Console

from ashl.config.construct import construct, report_own_faults
from ashl.config.identity import config_hash
from ashl.config.override import path_of
from ashl.config.recorded import COMMAND, config_of
from ashl.config.signals import handle_signals
from ashl.errors import AshlError, UsageError, unwritable_path_error
from ashl.launch.environment import JobMembership, read_membership
from ashl.plan.plan import Plan
from ashl.planning.compile_plan import PreparedPlan, prepare_plan
from ashl.planning.device import device_of
from ashl.planning.instantiate import Job, assemble_job
from ashl.run import checkpoints, launch, rescaling
from ashl.run import job as jobs
from ashl.run.checkpoints import Checkpoint, CheckpointManager
from ashl.run.host_time import predict_host_s_here
from ashl.run.monitor import Monitor
from ashl.run.process_setup import log_level, logging_to, show_title
from ashl.run.rescaling import Origin
from ashl.run.summary import summarise
from ashl.run.virtual import Saving, simulate
from ashl.runtime.rank_checkpoint import list_checkpoints
from ashl.tracking import jsonl
from ashl.tracking.console import Progress, print_outcome, print_unwrapped, seconds
from ashl.tracking.copying import Copier, describe_run, tracker_maker
from ashl.tracking.forecast import print_forecast, print_notes
from ashl.tracking.killed import close_killed
from ashl.tracking.option import TITLES, Tracking
from ashl.tracking.recorder import SUMMARY, Recorder

RUNS = Path("runs")
CONTROLLER_LOG = "controller.log"
# Keys of `runtime` that may change the bits of a result.
IDENTITY_KEYS = ("gradients", "threads", "device", "precision")
TRACKING_S = 30.0  # longest wait in seconds, at the end of a run, for its copy in a tracker


class RunOutcome(NamedTuple):
    """The exit code of a run and, in the process that records it, its folder and summary.

    In a job of another launcher, the processes of other ranks than 0 return the exit code of their
    rank. In the process that records the run the code is 0: all other ends raise an error.
    """

    code: int
    run_dir: Path | None = None
    summary: dict[str, Any] | None = None


def run(
    config: dict[str, Any],
    overrides: list[str],
    *,
    quiet: bool = False,
    silent: bool = False,
    resume: Path | None = None,
    command: str = "",
    strict: bool = True,
) -> RunOutcome:
    """Compile the plan, run it and write its records.

    Args: resume, the folder of a run to resume from its checkpoint; quiet, show no progress;
    silent, show no outcome either; command, what the user typed, for the records (empty in a
    sweep); strict, reject overrides that have no effect (a resumed run accepts them).
    Raises: UsageError and DataMissingError before the run begins. AshlError if the run failed or
    diverged, and KeyboardInterrupt if it was interrupted; the records are complete by then, unless
    another interrupt arrived while they were written.
    """
    log_level()
    config, membership = detect_job(config)
    with jobs.sharing_error(membership):
        tracking = construct(config["tracking"], "tracking", config["allow_targets"])
        plan, parts, data = prepare_plan(
            config,
            membership.world_size if membership else None,
            overrides,
            strict=strict and resume is None,
        )
    if membership is not None and membership.rank != 0:
        return RunOutcome(jobs.run_as_rank(plan, parts, config, membership))
    lead = None if membership is None else jobs.lead_job(plan, parts, config, membership)
    if lead is not None:
        plan = replace(plan, notes=(*plan.notes, *lead.notes))
    elif parts.runtime.name == "local":
        launch.check_local(plan, parts)
    torch.set_num_threads(parts.runtime.threads)
    with jobs.sharing_error(membership, lead and lead.requests):
        device = lead.rank_settings[0].device if lead else device_of(parts.runtime)
        job = assemble_job(plan, device, parts, data)
        opened = open_run(
            config,
            overrides,
            plan,
            job,
            tracking,
            find_restarted_run(config, membership) or resume,
            command,
        )
        return run_opened(opened, lead, quiet=quiet, silent=silent)


class OpenedRun(NamedTuple):
    """A run whose folder is open for its records."""

    config: dict[str, Any]
    command: str  # the typed command; empty in a sweep
    tracking: Tracking
    plan: Plan
    job: Job
    recorder: Recorder
    saved: Checkpoint | None  # the checkpoint to resume from
    origin: Origin | None  # the earlier run, if the number of workers has changed


def open_run(
    config: dict[str, Any],
    overrides: list[str],
    plan: Plan,
    job: Job,
    tracking: Tracking,
    resume: Path | None,
    command: str,
) -> OpenedRun:
    """Open the folder of a new run, or that of the run to resume, and write the run's inputs.

    Args: resume, the folder of the run to resume, or None; command, what the user typed (empty in a
    sweep).
    Raises: UsageError if the run cannot be resumed, or if the folder cannot be written; AshlError
    while another process writes its records.
    """
    if resume is not None:
        close_killed(resume)
    resume, origin, plan = resolve_resume(resume, config, plan, job)
    saved, sizes = (None, None) if resume is None else load_checkpoint(resume, config, plan)
    recorder = Recorder(resume or make_run_folder(config, plan), tracking.events, sizes)
    write_inputs(recorder, config, overrides, None if saved else plan, command)
    return OpenedRun(config, command, tracking, plan, job, recorder, saved, origin)


def run_opened(
    opened: OpenedRun, lead: launch.Lead | None, *, quiet: bool, silent: bool
) -> RunOutcome:
    """Run to the end, write the summary and print the outcome.

    Args: lead, the control store and the settings of this process's ranks in a job of another
    launcher; None without a job.
    Raises: AshlError if the run failed or diverged; KeyboardInterrupt if it was interrupted.
    """
    config, plan, recorder = opened.config, opened.plan, opened.recorder
    console = Console(highlight=False)
    if not quiet:
        print_notes(console, plan)
    progress = Progress(
        console, name=plan.name, quiet=quiet, target_accuracy=plan.limits.target_accuracy
    )
    monitor = Monitor(
        plan,
        opened.job,
        recorder,
        progress,
        rounds=opened.tracking.events,
        weights=config["run"]["save_weights"] is not False,
    )
    copier = start_copier(opened)
    with stop_on_interrupt(monitor):
        saving = Saving(identity(config), config["run"]["checkpoint_s"])
        pace, failure = run_to_end(plan, monitor, lead, saving, opened.saved, opened.origin)
        status, reason = run_status(monitor, failure)
        summary = summarise(monitor, opened.job.parts.runtime.name, status, reason, pace)
        close_records(monitor, summary, failure)
        copy_place, copy_warning = copier.finish(TRACKING_S) if copier else (None, None)
    if not silent:
        copied = {copier.title: copy_place} if copier else {}
        print_outcome(console, summary, recorder.run_dir, copied)
        print_resume_command(console, recorder.run_dir, config, status)
    warn(copy_warning)
    return conclude_run(monitor, summary, failure)


def conclude_run(
    monitor: Monitor, summary: dict[str, Any], failure: Exception | None
) -> RunOutcome:
    """Print the compression warning of a run whose records are complete. Return the outcome of a
    finished run, or raise the error of any other.

    Raises: `failure`; AshlError if the run diverged; KeyboardInterrupt if it was interrupted, also
    after its last step.
    """
    run_dir, status = monitor.recorder.run_dir, summary["status"]
    warn(monitor.run_state.compression.warning)
    if failure:
        raise failure
    if status == "diverged":
        raise AshlError(
            f"the run diverged: {summary['exit_reason']}; lower optimizer.lr, for example, or look"
            f" for nan and inf in data of your own. Its records are in {run_dir}"
        )
    # An interrupt after the last step ends the command, too: a sweep must not begin its next run.
    if monitor.stop_reason == "interrupted" or status == "interrupted":
        lacks = status == "interrupted" and not list_checkpoints(run_dir)
        without = ", without a checkpoint to resume from" if lacks else ""
        raise KeyboardInterrupt(f"the records are in {run_dir}{without}")
    return RunOutcome(0, run_dir, summary)


def run_to_end(
    plan: Plan,
    monitor: Monitor,
    lead: launch.Lead | None,
    saving: Saving,
    saved: Checkpoint | None,
    origin: Origin | None,
) -> tuple[dict | None, Exception | None]:
    """Run the plan.

    Args: lead, as in `run_opened`; saving, the checkpoints to take; saved, the checkpoint to resume
    from, or None; origin, in place of `saved`, the run with another number of workers to resume
    from.
    Returns: (pacing statistics of a paced run or None, error or None). An error is returned, not
    raised, because the caller finishes the records after any error. The second Ctrl-C returns
    (None, None); `run_status` recognizes the interrupted run.
    """
    try:
        with report_own_faults(plan.allow_targets, AshlError):
            if origin is not None:
                saved = rescaling.begin_rescaled_run(origin, plan, monitor, saving)
            return run_kernel(plan, monitor, lead, saving, saved), None
    except KeyboardInterrupt:
        return None, None
    except Exception as error:
        return None, error
    finally:
        monitor.progress.close()


def print_resume_command(
    console: Console, run_dir: Path, config: Mapping[str, Any], status: str
) -> None:
    """Print the command that resumes a run of this status, if it can be resumed."""
    # a failed run in virtual time would fail again in the same way
    is_resumable = status == "interrupted" or (status == "failed" and not is_virtual(config))
    if is_resumable and list_checkpoints(run_dir):
        line = f"resume with `{resume_command(run_dir, config)}`"
        print_unwrapped(console, line)


def resume_command(run_dir: Path, config: Mapping[str, Any]) -> str:
    """Return the command that resumes an unfinished run from its checkpoint."""
    packages = (
        [f"allow_targets=[{','.join(config['allow_targets'])}]"] if config["allow_targets"] else []
    )
    return shlex.join(["ashl", "train", "--resume", str(run_dir), *packages])


def detect_job(config: dict[str, Any]) -> tuple[dict[str, Any], JobMembership | None]:
    """Return the configuration, and the job of another launcher that the environment describes, or
    None.

    With runtime=local under another launcher the process joins the job, as with runtime=torchrun:
    the returned configuration has that runtime. In virtual time there is no job.
    """
    kind = config["runtime"].get("_target_", "").rsplit(".", 1)[-1]
    membership = read_membership() if kind in ("LocalRuntime", "TorchrunRuntime") else None
    if membership and kind == "LocalRuntime":
        config = {
            **config,
            "choices": {**config["choices"], "runtime": "torchrun"},
            "runtime": {**config["runtime"], "_target_": "ashl.runtime.runtimes.TorchrunRuntime"},
        }
    return config, membership


def run_kernel(
    plan: Plan,
    monitor: Monitor,
    lead: launch.Lead | None,
    saving: Saving,
    saved: Checkpoint | None,
) -> dict | None:
    """Run the plan on its kernel: in virtual time in this process, or by a controller of processes.

    Args: as of `run_to_end`.
    Returns: the pacing statistics of a paced run, else None.
    Raises: AshlError, or an error of the user's code, if the run fails.
    """
    warn(saved and saved.broken)
    if plan.runtime["_target_"].endswith("SimRuntime"):
        simulate(plan, monitor.job, monitor, saving, saved)
        return None
    run_dir = monitor.recorder.run_dir
    # the rank by whose clock evaluations count; None if several ranks send the parts of one model
    lead_rank = None if monitor.run_state.parts is not None else plan.lead_rank
    checkpoint_manager = CheckpointManager(
        run_dir, plan.num_ranks, saving.every_s, saving.identity, lead_rank
    )
    with (
        logging_to(run_dir / CONTROLLER_LOG, "controller"),
        show_title("ashl controller"),
    ):
        if saved is not None:
            monitor.resume_from(checkpoints.read_monitor_state(saved, plan.limits))
        run_lead = lead or launch.lead_here(plan, monitor.job.parts)
        # Other processes of a job may still read from the store, so it stays open until process 0
        # ends.
        with nullcontext() if lead else closing(run_lead.store):
            pace = launch.run_controller(
                plan, run_dir, monitor, run_lead, checkpoint_manager, saved
            )
    warn(checkpoint_manager.warning)
    return pace


def warn(text: str | None) -> None:
    """Print a warning on standard error, if there is one."""
    if text is not None:
        Console(stderr=True, highlight=False).print(f"ashl: {text}", soft_wrap=True, markup=False)


def identity(config: dict[str, Any]) -> str:
    """Return the hash of a configuration by which a checkpoint recognizes its run.

    A checkpoint is resumed only by a configuration with the same hash. `stop`, `run` except
    `run.start_from`, `name`, `sweep`, `tracking`, `choices` (the names of the options) and all
    keys of `runtime` except `IDENTITY_KEYS` are not part of it, so they may change.
    """
    runtime = {"gradients": True, **config["runtime"]}
    kept = {
        "stop": None,
        "start_from": config["run"]["start_from"],
        "runtime": {key: runtime[key] for key in IDENTITY_KEYS},
    }
    return config_hash({**config, **kept})


def resolve_resume(
    resume: Path | None, config: dict[str, Any], plan: Plan, job: Job
) -> tuple[Path | None, Origin | None, Plan]:
    """Decide how to resume. Returns: (folder to resume in, origin, plan); None where it is not set.

    If the number of workers is unchanged, the run resumes in its folder. Otherwise it has a new
    folder and an origin, the earlier run, which a note of the plan names.
    """
    if resume is None or not rescaling.rescales(config, resume):
        return resume, None, plan
    origin = rescaling.origin_of(resume, identity(config_of(resume)), plan, job)
    return None, origin, replace(plan, notes=(*plan.notes, origin.note))


def load_checkpoint(
    run_dir: Path, config: dict[str, Any], plan: Plan
) -> tuple[Checkpoint, dict[str, int]]:
    """Load the newest checkpoint of a run, and remove later records from the run folder.

    Returns: (checkpoint, size in bytes of each file of records).
    Raises: UsageError if there is no valid checkpoint, if it is of another configuration, number of
    workers or kernel, or if a file of records is damaged. AshlError while another process writes
    the records.
    """
    saved = checkpoints.find_newest(run_dir, identity(config))
    before = checkpoints.plan_of(saved).num_workers
    # A configured number of workers is part of the identity. So only the size of a job can differ.
    if before != plan.num_workers:
        n = plan.num_workers
        raise UsageError(
            f"{run_dir} has {before} workers, and this job has {n}; add cluster.num_workers={n} to"
            f" resume the run with {n} workers"
        )
    checkpoints.refuse_other_kernel(run_dir, saved, virtual=is_virtual(config))
    return saved, checkpoints.truncate_records(run_dir, saved)


def find_restarted_run(config: Mapping[str, Any], membership: JobMembership | None) -> Path | None:
    """Return the folder of the run that the processes of a job resume, because torchrun has
    restarted them; None if they begin a new run.

    It is `run.dir`, if it is set and holds a checkpoint. A run is resumed unless it has finished,
    also if it has failed or was interrupted.
    Raises: AshlError if the run has diverged, because it would diverge again.
    """
    if membership is None or membership.attempt == "0" or not config["run"]["dir"]:
        return None
    run_dir = path_of(config["run"]["dir"])
    status = (jsonl.read_json(run_dir / SUMMARY) or {}).get("status")
    if status == "diverged":
        raise AshlError(f"the run in {run_dir} has diverged, and would again; it is not restarted")
    if not list_checkpoints(run_dir) or status == "finished":
        return None
    warn(f"restarted: the run in {run_dir} resumes from its last checkpoint")
    return run_dir


def close_records(monitor: Monitor, summary: dict, failure: Exception | None) -> None:
    """Write the last metrics and the summary, and close the records.

    Raises: AshlError if that fails and the run has not failed before. Otherwise the user reads the
    error of the run.
    """
    try:
        try:
            monitor.write_final_metrics(summary)
        finally:
            monitor.recorder.close(summary)
    except AshlError:
        if failure is None:
            raise


def run_status(monitor: Monitor, failure: Exception | None) -> tuple[str, str]:
    """Return the run's status and the reason why it ended, as in `summary.json`."""
    if failure is not None:
        return "failed", str(failure)
    if monitor.final is None:  # after an interrupt, not all ranks had exited when the run ended
        return "interrupted", monitor.stop_reason or "interrupted"
    reason = monitor.run_state.stages[-1].reason or ""
    if monitor.final.diverged:
        return "diverged", monitor.not_finite or monitor.final.diverged
    return ("interrupted" if reason == "interrupted" else "finished"), reason


class DryRun(NamedTuple):
    """The plan of a run, and the predicted time that this machine needs for it."""

    plan: Plan
    epoch_samples: int  # number of training samples
    # predicted host seconds of a run in virtual time that no target ends; else None
    host_s: float | None
    leads: bool  # False in the processes of a job that print nothing: all except process 0

    def show(self) -> None:
        """Print the stages with their predicted times."""
        console = Console(highlight=False)
        print_forecast(console, self.plan, self.epoch_samples)
        if self.host_s is not None:
            text = f"on this machine about {seconds(self.host_s)}, less if a target ends the run"
            console.print(text, soft_wrap=True)

    def document(self) -> dict[str, Any]:
        """Return the plan as in plan.json, and the seconds on this machine."""
        return {"plan": json.loads(self.plan.to_json()), "host_s": self.host_s}


def dry_run(config: dict[str, Any], overrides: list[str], processes: int | None = None) -> DryRun:
    """Check, plan and estimate a run without running it.

    Args: processes, the number of processes that a job will have; None = without a job.
    """
    config, membership = detect_job(config)
    plan, parts, data = prepare_plan(
        config, membership.world_size if membership else processes, overrides, strict=True
    )
    construct(config["tracking"], "tracking", config["allow_targets"])
    leads = membership is None or membership.rank == 0
    host_s = None
    if leads and is_virtual(config):
        host_s = predict_host_s_here(PreparedPlan(plan, parts, data))
    return DryRun(plan, len(data.train), host_s, leads)


def is_virtual(config: Mapping[str, Any]) -> bool:
    """Return True if this configuration runs in virtual time."""
    return config["runtime"]["_target_"].endswith("SimRuntime")


def make_run_folder(config: Mapping[str, Any], plan: Plan) -> Path:
    """Return `run.dir`, or make a new folder under runs/.

    Raises: UsageError for a place that cannot be written, AshlError for a full disk.
    """
    if config["run"]["dir"]:
        return path_of(config["run"]["dir"])
    day = time.strftime("%Y-%m-%d")
    moment = time.strftime("%H-%M-%S")
    base = RUNS / day / f"{moment}-{plan.name}-{config_hash(config)}"
    for path in (base, *(base.with_name(f"{base.name}-{k}") for k in range(2, 1000))):
        try:
            # the folder is made here, so that two runs that begin in one second do not share it
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            fix = "choose another run.dir"
            raise unwritable_path_error(f"cannot make the run folder {path}", error, fix) from error
        return path
    raise AshlError(f"{base} and 998 folders like it exist; choose another run.dir")


def write_inputs(
    recorder: Recorder,
    config: dict[str, Any],
    overrides: list[str],
    plan: Plan | None,
    command: str,
) -> None:
    """Write the configuration, the overrides, the command and the plan into the run folder.

    Args: plan, None for a resumed run: its folder already holds the plan.
    """
    recorder.document("config.yaml", yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
    recorder.document("overrides.yaml", yaml.safe_dump(overrides))
    if command:
        recorder.document(COMMAND, f"{command}\n")
    if plan is not None:
        recorder.document("plan.json", plan.to_json())


def start_copier(opened: OpenedRun) -> Copier | None:
    """Start the thread that copies the run to a tracker, unless tracking=none."""
    sink, plan = opened.tracking.sink, opened.plan
    if sink == "none":
        return None
    run = describe_run(
        opened.recorder.run_dir,
        f"{plan.name}-s{plan.seed}",
        opened.tracking.experiment,
        opened.config,
        opened.command,
    )
    return Copier(tracker_maker(sink, RUNS.absolute()), TITLES[sink], run)


@contextmanager
def stop_on_interrupt(monitor: Monitor) -> Generator[None]:
    """Ask the run to stop and finish its records at the first interrupt; end it at the second.

    A SIGHUP is never a second interrupt, because a terminal that closes may send it twice.
    """

    def handle(number: int, frame: object) -> None:
        if monitor.stop_reason == "interrupted" and number != signal.SIGHUP:
            raise KeyboardInterrupt
        monitor.stop_reason = "interrupted"

    with handle_signals(handle):
        yield
