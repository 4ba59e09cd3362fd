"""A run from a composed configuration to its outcome: plan, run folder, kernel, records,
exit code.
"""

import shlex
import signal
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from rich.console import Console

from ashl.config.construct import construct, own_faults
from ashl.config.identity import config_hash
from ashl.config.recorded import config_of
from ashl.errors import AshlError, UsageError
from ashl.plan.plan import Plan
from ashl.planning.compatibility import runs_in_lockstep, saves_one_round
from ashl.planning.compile_plan import PreparedPlan, prepare_plan
from ashl.planning.device import device_of
from ashl.planning.instantiate import Job, Parts, assemble
from ashl.report.compare import REPORT, compare
from ashl.report.records import COMMAND
from ashl.run import checkpoints, launch, rescaling
from ashl.run import job as jobs
from ashl.run.checkpoints import ANEW, EACH, LOCKSTEP, ROUND, SERVER, Checkpoint, CheckpointManager
from ashl.run.host_time import host_here_s
from ashl.run.launcher_env import JobMembership, read_membership
from ashl.run.monitor import Monitor
from ashl.run.process_setup import handle_signals, log_level
from ashl.run.rescaling import Origin
from ashl.run.summary import summarise
from ashl.run.virtual import Saving, simulate
from ashl.runtime.rank_checkpoint import list_checkpoints
from ashl.tracking import jsonl, mlflow
from ashl.tracking.console import Progress, outcome, seconds
from ashl.tracking.forecast import forecast, notes
from ashl.tracking.killed import close_killed
from ashl.tracking.option import Tracking
from ashl.tracking.recorder import SUMMARY, Recorder

RUNS = Path("runs")
OF_A_RUN = ("gradients", "threads", "device", "precision")  # of `runtime`: what may change its bits
MLFLOW_S = 30.0  # how long the end of a run waits for its copy in MLflow


class RunOutcome(NamedTuple):
    """A run that ended as it should: its exit code and, in the process that records it, the folder
    and the summary.
    """

    code: int
    run_dir: Path | None = None
    summary: dict[str, Any] | None = None


def train(
    config: dict[str, Any],
    overrides: list[str],
    *,
    quiet: bool = False,
    silent: bool = False,
    resume: Path | None = None,
    command: str = "",
    strict: bool = True,
) -> int:
    """The exit code of `run`."""
    return run(
        config, overrides, quiet=quiet, silent=silent, resume=resume, command=command, strict=strict
    ).code


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
    """Plan, run, record. `resume` is the folder of a run to go on with from its checkpoint; `quiet`
    shows no progress, `silent` not even the outcome. `command` is what was typed, for its records;
    a run of a sweep has none of its own. With `strict`, a typed value without an effect is refused,
    unless the run is resumed.

    Raises UsageError and DataMissingError before anything is started, AshlError when the run failed
    or diverged, and KeyboardInterrupt when it was interrupted; the records are complete by then.
    """
    log_level()
    config, job = detect_job(config)
    with jobs.reporting_error_to_job(job):
        tracking = construct(config["tracking"], "tracking", config["allow_targets"])
        plan, parts, data = prepare_plan(
            config, job.world_size if job else None, overrides, strict=strict and resume is None
        )
    plan, assignment = assign_process(plan, parts, config, job)
    if assignment and assignment.job.rank != 0:
        return RunOutcome(jobs.run_as_rank(plan, assignment))
    runtime = parts.runtime
    torch.set_num_threads(runtime.threads)
    with jobs.aborting_job_on_error(plan, assignment):
        whole = assemble(
            plan, assignment.settings.device if assignment else device_of(runtime), parts, data
        )
        if resume is not None:
            close_killed(resume)
        resume, origin, plan = resolve_resume(
            find_restarted_run(config, job) or resume, config, plan, whole
        )
        saved, sizes = (None, None) if resume is None else load_checkpoint(resume, config, plan)
        run_dir = resume or make_run_folder(config, plan)
        recorder = Recorder(run_dir, tracking.events, sizes)
        write_inputs(recorder, config, overrides, None if saved else plan, command)
    console = Console(highlight=False)
    if not quiet:
        notes(console, plan)
    progress = Progress(
        console, name=plan.name, quiet=quiet, target_accuracy=plan.limits.target_accuracy
    )
    monitor = Monitor(
        plan,
        whole,
        recorder,
        progress,
        rounds=tracking.events,
        weights=config["run"]["save_weights"] is not False,
    )
    writer = start_mlflow(tracking, run_dir, plan, config, command)
    failure: Exception | None = None
    with stop_on_interrupt(monitor):
        try:
            with own_faults(plan.allow_targets, AshlError):
                saving = Saving(identity(config), config["run"]["checkpoint_s"])
                saved = saved if origin is None else rescaling.begin(origin, plan, monitor, saving)
                pace = run_kernel(plan, run_dir, monitor, assignment, saving, saved)
        except KeyboardInterrupt:  # a second Ctrl-C
            pace = None
        except Exception as error:  # whatever it was, the records are finished first
            failure, pace = error, None
        finally:
            progress.close()
        status, reason = run_status(monitor, failure)
        summary = summarise(monitor, runtime.name, status, reason, pace)
        finish(monitor, summary, failure)
        unwritten = write_report(run_dir) if status == "finished" else None
        link, warning = mlflow.finish(writer, MLFLOW_S) if writer else (None, None)
    if not silent:
        outcome(console, summary, run_dir, link)
        if status == "interrupted" and list_checkpoints(run_dir):
            console.print(
                f"go on with `{resume_command(run_dir, config)}`", soft_wrap=True, markup=False
            )
    for text in filter(
        None,
        (
            monitor.run_state.compression.warning,
            untrusted_messages(monitor),
            warning,
            None if silent else unwritten,
        ),
    ):
        Console(stderr=True, highlight=False).print(f"ashl: {text}", soft_wrap=True)
    if failure:
        raise failure
    if status == "diverged":
        raise AshlError(
            f"the run diverged: {reason}; lower optimizer.lr, say. Its records are in {run_dir}"
        )
    if status == "interrupted":
        raise KeyboardInterrupt
    return RunOutcome(0, run_dir, summary)


def resume_command(run_dir: Path, config: Mapping[str, Any]) -> str:
    """The command that goes on with an interrupted run from its checkpoint."""
    packages = (
        [f"allow_targets=[{','.join(config['allow_targets'])}]"] if config["allow_targets"] else []
    )
    return shlex.join(["ashl", "train", "--resume", str(run_dir), *packages])


def write_report(run_dir: Path) -> str | None:
    """Its report, as `ashl compare RUN` writes one; why not, where that is so."""
    try:
        compare([run_dir], out=run_dir / REPORT)
    except AshlError as error:
        return f"there is no {REPORT}: {error}"
    return None


def detect_job(config: dict[str, Any]) -> tuple[dict[str, Any], JobMembership | None]:
    """The job that the environment names, if real processes are wanted: `ashl train` under torchrun
    joins it.
    """
    kind = config["runtime"].get("_target_", "").rsplit(".", 1)[-1]
    job = read_membership() if kind in ("LocalRuntime", "TorchrunRuntime") else None
    if job and kind == "LocalRuntime":
        config = {
            **config,
            "choices": {**config["choices"], "runtime": "torchrun"},
            "runtime": {**config["runtime"], "_target_": "ashl.runtime.runtimes.TorchrunRuntime"},
        }
    return config, job


def assign_process(
    plan: Plan, parts: Parts, config: dict[str, Any], job: JobMembership | None
) -> tuple[Plan, jobs.ProcessAssignment | None]:
    """The plan with what is to be said of who is where, and this process's seat in its job, once
    all have met.
    """
    if job is not None:
        assignment = jobs.join_job(plan, parts, config, job)
        return replace(plan, notes=(*plan.notes, *assignment.notes)), assignment
    if parts.runtime.name == "local":
        launch.check_local(plan, parts.runtime)
    return plan, None


def run_kernel(
    plan: Plan,
    run_dir: Path,
    monitor: Monitor,
    assignment: jobs.ProcessAssignment | None,
    saving: Saving,
    saved: Checkpoint | None,
) -> dict | None:
    """Run the plan where it wants to be run; returns how a paced run kept its pace."""
    warn(saved and saved.broken)
    if plan.runtime["_target_"].endswith("SimRuntime"):
        simulate(plan, monitor.job, monitor, saving, saved)
        return None
    checkpoint_manager = make_checkpoint_manager(plan, run_dir, monitor, saving)
    with jobs.aborting_job_on_error(plan, assignment):
        if saved is not None:
            monitor.resume_from(checkpoints.monitor_of(saved, plan.limits))
    if saved is not None:
        checkpoint_manager.number = saved.number + 1
        if checkpoint_manager.every_s is not None:
            checkpoint_manager.plan_next(saved.time_ns)
    if assignment:
        pace = jobs.run_as_controller(plan, run_dir, monitor, assignment, checkpoint_manager, saved)
    else:
        pace = launch.launch(plan, run_dir, monitor, checkpoint_manager, saved)
    warn(checkpoint_manager.warning)
    return pace


def make_checkpoint_manager(
    plan: Plan, run_dir: Path, monitor: Monitor, saving: Saving
) -> CheckpointManager:
    """How real processes leave checkpoints of this run."""
    how, replicas = SERVER, monitor.job.stages[0].replicas
    if runs_in_lockstep(monitor.job.parts, plan.num_workers):
        how = LOCKSTEP
    elif replicas:
        how = ROUND if any(saves_one_round(own) for own in monitor.job.parts.stages) else EACH
    home = None if how == LOCKSTEP and replicas else plan.lead_rank
    servers = plan.num_ranks - plan.num_workers if how == SERVER else 1
    return CheckpointManager(
        run_dir, plan.num_ranks, saving.every_s, saving.identity, how, home, servers
    )


def warn(text: str | None) -> None:
    if text is not None:
        Console(stderr=True, highlight=False).print(f"ashl: {text}", soft_wrap=True, markup=False)


def identity(config: dict[str, Any]) -> str:
    """What a run is, apart from when it stops, and whether in virtual time or on processes."""
    runtime = {"gradients": True, **config["runtime"]}
    return config_hash({**config, "stop": None, "runtime": {key: runtime[key] for key in OF_A_RUN}})


def resolve_resume(
    resume: Path | None, config: dict[str, Any], plan: Plan, job: Job
) -> tuple[Path | None, Origin | None, Plan]:
    """The run to go on with in its own folder, or with other workers in one of theirs, and the
    plan, which says so.
    """
    if resume is None or not rescaling.rescales(config, resume):
        return resume, None, plan
    origin = rescaling.origin_of(resume, identity(config_of(resume)), plan, job)
    return None, origin, replace(plan, notes=(*plan.notes, origin.note))


def load_checkpoint(
    run_dir: Path, config: dict[str, Any], plan: Plan
) -> tuple[Checkpoint, dict[str, int]]:
    """The checkpoint of this run, and how much of its records is from before. Raises UsageError
    where there is none, or where it is of another run.
    """
    saved = checkpoints.newest(run_dir, identity(config))
    if (
        before := checkpoints.plan_of(saved).num_workers
    ) != plan.num_workers:  # by the size of a job
        n = plan.num_workers
        raise UsageError(
            f"{run_dir} has {before} workers, and this job {n}; take it on with"
            f" cluster.num_workers={n}"
        )
    if saved.how != ANEW:
        checkpoints.refuse_other_kernel(run_dir, saved, virtual=is_virtual(config))
    return saved, checkpoints.truncate_records(run_dir, saved)


def find_restarted_run(config: Mapping[str, Any], job: JobMembership | None) -> Path | None:
    """The folder of this run, where torchrun has started all of its processes anew, and it has left
    a checkpoint there to go on from.
    """
    if job is None or job.attempt == "0" or not config["run"]["dir"]:
        return None
    run_dir = Path(config["run"]["dir"]).expanduser()
    if (
        not list_checkpoints(run_dir)
        or (jsonl.whole(run_dir / SUMMARY) or {}).get("status") == "finished"
    ):
        return None
    warn(f"restarted: the run in {run_dir} resumes from its last checkpoint")
    return run_dir


def finish(monitor: Monitor, summary: dict, failure: Exception | None) -> None:
    """Close the records. When the run has failed already (a full disk, say), that is what the user
    hears of.
    """
    try:
        try:
            monitor.write_final_metrics(summary)
        finally:
            monitor.recorder.close(summary)
    except AshlError:
        if failure is None:
            raise


def untrusted_messages(monitor: Monitor) -> str | None:
    """A warning where others have written into the job's store."""
    count = monitor.refused
    return (
        f"{count} messages in the job's store were not of this run and were ignored"
        if count
        else None
    )


def run_status(monitor: Monitor, failure: Exception | None) -> tuple[str, str]:
    """(status, reason)."""
    if failure is not None:
        return "failed", str(failure)
    if monitor.final is None:  # the ranks did not leave in order: nobody waited for them any longer
        return "interrupted", monitor.stopping or "interrupted"
    reason = monitor.run_state.stages[-1].reason or ""
    if monitor.final.diverged:
        return "diverged", monitor.not_finite or monitor.final.diverged
    return ("interrupted" if reason == "interrupted" else "finished"), reason


def dry_run(config: dict[str, Any], overrides: list[str], processes: int | None = None) -> None:
    """Compose, check, plan and estimate; run nothing. `processes`: how many a job will have."""
    config, job = detect_job(config)
    plan, parts, data = prepare_plan(
        config, job.world_size if job else processes, overrides, strict=True
    )
    construct(config["tracking"], "tracking", config["allow_targets"])
    if job or processes:
        size = job.world_size if job else processes or 0
        plan = replace(
            plan,
            notes=(*plan.notes, *jobs.notes_before_start(plan, parts, config["profile"], size)),
        )
    if job is None or job.rank == 0:
        console = Console(highlight=False)
        forecast(console, plan, len(data.train))
        if (
            is_virtual(config)
            and (host_s := host_here_s(PreparedPlan(plan, parts, data))) is not None
        ):
            console.print(f"on this machine about {seconds(host_s)} at most")


def is_virtual(config: Mapping[str, Any]) -> bool:
    return config["runtime"]["_target_"].endswith("SimRuntime")


def make_run_folder(config: Mapping[str, Any], plan: Plan) -> Path:
    """Where this run writes: `run.dir`, or a new folder under runs/."""
    if config["run"]["dir"]:
        return Path(config["run"]["dir"]).expanduser()
    day, moment = time.strftime("%Y-%m-%d"), time.strftime("%H-%M-%S")
    base = RUNS / day / f"{moment}-{plan.name}-{config_hash(config)}"
    for path in (base, *(base.with_name(f"{base.name}-{k}") for k in range(2, 1000))):
        try:
            path.mkdir(
                parents=True
            )  # made at once, so that two runs of the same second never share it
        except FileExistsError:
            continue
        except OSError as error:
            raise AshlError(
                f"cannot make the run folder {path} ({error.strerror}); choose another run.dir"
            ) from error
        return path
    raise AshlError(f"{base} and a thousand more like it exist; choose another run.dir")


def write_inputs(
    recorder: Recorder,
    config: dict[str, Any],
    overrides: list[str],
    plan: Plan | None,
    command: str,
) -> None:
    recorder.document("config.yaml", yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
    recorder.document("overrides.yaml", yaml.safe_dump(overrides))
    if command:
        recorder.document(COMMAND, f"{command}\n")
    if plan is not None:  # else it is there already, perhaps planned anew during the run
        recorder.document("plan.json", plan.to_json())


def start_mlflow(
    tracking: Tracking, run_dir: Path, plan: Plan, config: dict[str, Any], command: str
) -> mlflow.Writer | None:
    if tracking.sink == "none":
        return None
    tags = {"ashl.kind": "run", "ashl.config_hash": config_hash(config)}
    if command:
        tags["mlflow.note.content"] = f"`{command}`"
    return mlflow.start(
        run_dir,
        store=RUNS,
        experiment=tracking.experiment,
        run_name=f"{plan.name}-s{plan.seed}",
        params=config,
        tags=tags,
    )


@contextmanager
def stop_on_interrupt(monitor: Monitor) -> Generator[None]:
    """The first Ctrl-C ends the run through ordinary replies, so that nothing is lost; the second
    one ends it now. A terminal that closes may send SIGHUP twice.
    """

    def handle(number: int, frame: object) -> None:
        if monitor.stopping == "interrupted" and number != signal.SIGHUP:
            raise KeyboardInterrupt
        monitor.stopping = "interrupted"

    with handle_signals(handle):
        yield
