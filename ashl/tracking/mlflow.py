"""Copy a run folder to MLflow in a process of its own; only this module imports mlflow.

`start` launches `python -m ashl.tracking.mlflow RUN_DIR`, which follows metrics.jsonl. `finish`
closes the writer's standard input and returns its answer. So a slow, locked, deleted or unreachable
store never delays the run: the records in its folder are complete. If the run's process dies, the
input closes as well, and the writer ends.

A writer that is killed leaves its run RUNNING for ever. So each writer holds a lock on its log
file, and the next writer ends the runs whose lock is free.
"""

import fcntl
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ashl.tracking import jsonl, view
from ashl.tracking import store as stores
from ashl.tracking.recorder import METRICS, SUMMARY, TRACE

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import RunInfo

LOG = "mlflow.log"  # in the run folder: what failed; the lock on it shows that the writer lives
ARTIFACTS = (
    SUMMARY,
    "config.yaml",
    "overrides.yaml",
    "profile.json",
    "plan.json",
    TRACE,
    "report.html",
)
STATUS = {"finished": "FINISHED", "failed": "FAILED", "diverged": "FAILED", "interrupted": "KILLED"}
# Artifact root of MLflow's default experiment: a path with quotes would break its SQL.
ROOT = "_MLFLOW_SERVER_ARTIFACT_ROOT"
PERIOD_S = 1.0  # seconds between two readings of metrics.jsonl
# Seconds that a writer has after its input is closed; a living parent usually waits less.
LAST_WORDS_S = 60
MAX_NAME = 250  # characters
INVALID = "INVALID_PARAMETER_VALUE"  # MLflow's code for a value that it will never accept
# MLflow's limits: metrics and parameters in one call, characters of a value.
MAX_METRICS, MAX_PARAMS, MAX_TEXT = 1000, 100, 5000


@dataclass(frozen=True)
class Writer:
    """A writer process; if `process` is None, `warning` says why there is none."""

    run_dir: Path
    uri: str
    process: subprocess.Popen | None
    warning: str | None = None


def start(
    run_dir: Path,
    *,
    store: Path,
    experiment: str,
    run_name: str,
    params: Mapping,
    tags: Mapping[str, str],
    module: str = "ashl.tracking.mlflow",
) -> Writer:
    """Start to copy the run in `run_dir` to MLflow; returns at once and never raises.

    Args: store is the folder of `mlflow.db` and `artifacts/`, unless MLFLOW_TRACKING_URI is set;
    params is the configuration, nested or flat; tags may contain MLflow's own, such as
    `mlflow.note.content` and `mlflow.parentRunId`; module is that of the writer.
    """
    uri = stores.tracking_uri(store)
    job = {
        "uri": uri,
        "artifacts": stores.artifact_uri(store),
        "experiment": experiment,
        "run_name": run_name,
        "params": flat(params),
        "tags": {key: str(value)[:MAX_TEXT] for key, value in tags.items()},
    }
    try:
        with open(run_dir / LOG, "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(run_dir.absolute())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=stores.ENVIRONMENT
                | ({ROOT: job["artifacts"]} if job["artifacts"] else {})
                | os.environ,
                # Ctrl-C is for the run; the writer still has to log the end of the run.
                start_new_session=True,
            )
    except OSError as error:
        return Writer(run_dir, uri, None, warning_of(run_dir, f"its writer did not start: {error}"))
    writer = Writer(run_dir, uri, process)
    send_line(writer, job)
    return writer


def send_line(writer: Writer, line: Mapping) -> None:
    """Send a line to the writer; `finish` notices a dead one."""
    if writer.process is not None and writer.process.stdin is not None:
        with suppress(OSError):
            writer.process.stdin.write(json.dumps(line) + "\n")
            writer.process.stdin.flush()


def finish(writer: Writer, timeout_s: float = 30.0) -> tuple[str | None, str | None]:
    """Let the writer log the end of the run; return the deep link and a warning, each may be None.

    Never raises. Call it after `Recorder.close`: without a summary the run counts as failed.
    """
    if writer.process is None:
        return None, writer.warning
    try:
        answer, _ = writer.process.communicate(timeout=timeout_s)
        link, warning = json.loads(answer)
    except subprocess.TimeoutExpired:
        writer.process.kill()
        writer.process.communicate()
        reason = f"{timeout_s:g} s were not enough"
        if stores.is_locked(writer.uri):  # by another process, because the writer has ended
            reason = (
                f"{stores.public(writer.uri)} is locked by another process; waited {timeout_s:g} s"
            )
        link, warning = None, warning_of(writer.run_dir, reason)
    except ValueError:
        reason = (
            f"its writer ended with code {writer.process.returncode}, see {writer.run_dir / LOG}"
        )
        link, warning = None, warning_of(writer.run_dir, reason)
    with suppress(OSError):
        if (log := writer.run_dir / LOG).stat().st_size == 0:
            log.unlink()
    return link, warning


def flat(config: Mapping, prefix: str = "") -> dict[str, str]:
    """Return the configuration as MLflow shows it: dotted names, and each group with its option's
    name.

    The name is that in `choices`, else that of the class in `_target_`.

    >>> flat({"choices": {"sync": "mine"}, "seed": 0, "sync": {"_target_": "a.b.C", "lag": 3}})
    {'seed': '0', 'sync': 'mine', 'sync.lag': '3'}
    """
    params = {}
    # Without a choice of sync, the schedule names the sync modes of its stages.
    mute = "" if "sync" in config.get("choices", {"sync": ""}) else "sync"
    for key, value in config.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if name in ("choices", mute):
            continue
        if isinstance(value, Mapping):
            params |= flat(value, name)
        elif name.endswith("._target_"):
            # The name of ashl's options is that of their module, of others that of their class.
            parts = str(value).split(".")
            params[name.removesuffix("._target_")] = parts[-2] if parts[0] == "ashl" else parts[-1]
        else:
            params[name] = (value if isinstance(value, str) else json.dumps(value, default=str))[
                :MAX_TEXT
            ]
    return params if prefix else params | config.get("choices", {})


def accepted(name: str) -> str:
    """Return a name that MLflow accepts: other characters become underscores.

    No part of a path is empty or consists of dots.

    >>> accepted("measure/top@5 (all)"), accepted("a//../b")
    ('measure/top_5 _all_', 'a/_/_/b')
    """
    parts = re.sub(r"[^A-Za-z0-9_./ :-]", "_", name).split("/")
    return "/".join(part if part.strip(".") else "_" for part in parts)[:MAX_NAME]


def renamed(params: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters under names that MLflow accepts; equal names get a number appended."""
    found: dict[str, str] = {}
    for name, value in params.items():
        right, count = accepted(name), 1
        while right in found:
            count += 1
            right = f"{accepted(name)}_{count}"
        found[right] = value
    return found


def main() -> None:
    """Run the writer's process: `python -m ashl.tracking.mlflow RUN_DIR`."""
    serve(Copy)


class Copier(Protocol):
    """The work of a writer's process; a method that failed may be called again."""

    @property
    def run_dir(self) -> Path: ...

    @property
    def job(self) -> dict: ...

    def advance(self) -> None: ...

    def hear(self, line: dict) -> None: ...

    def loss(self) -> str | None: ...

    def close(self) -> tuple[str | None, str | None]: ...


def serve(make: Callable[[Path, dict], Copier]) -> None:
    """Run a writer's process.

    Its argument is the folder. Its input begins with the job, a line of JSON. Its answer is the
    deep link and a warning. `make(folder, job)` returns the object that copies.
    """
    os.nice(10)  # the run has priority
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # everything that MLflow prints belongs in the log
    folder = Path(sys.argv[1])
    job = json.loads(sys.stdin.readline())
    with open(folder / LOG, "ab") as log, answer:
        fcntl.flock(log, fcntl.LOCK_EX)
        json.dump(_follow(make(folder, job)), answer)


def _follow(copy: Copier) -> tuple[str | None, str | None]:
    """Copy until the input is closed, and repeat after each failure; return the deep link and a
    warning.
    """
    ended = False
    while True:
        try:
            copy.advance()
            if ended:
                return copy.close()
        except Exception as error:  # MLflow and its stores fail in too many ways to name them
            reason = str(error).replace(
                copy.job["uri"].rstrip("/"), stores.public(copy.job["uri"]).rstrip("/")
            )
            print(f"{type(error).__name__}: {reason}", file=sys.stderr)
            if ended:
                return None, warning_of(copy.run_dir, copy.loss() or reason)
        while not ended and select.select([sys.stdin], [], [], PERIOD_S)[0]:
            if line := sys.stdin.readline():
                copy.hear(json.loads(line))
            else:
                ended = True
                signal.alarm(LAST_WORDS_S)


class Copy:
    """The MLflow side of one run; a method that failed may be called again."""

    client: "MlflowClient"
    experiment: str | None = None
    run: "RunInfo"

    def __init__(self, run_dir: Path, job: dict):
        self.run_dir = run_dir
        self.job = job
        self.params = list(renamed(job["params"]).items())
        self.refused: dict[str, None] = {}  # names that MLflow has refused
        self.copied = 0  # bytes of metrics.jsonl
        # start and end of a run that has ended; None = it is in progress
        self.span_ms = span_ms(run_dir)

    def advance(self) -> None:
        """Create the run if there is none, then copy new metrics."""
        if self.experiment is None:
            self._open()
        self.log_params()
        records, end = jsonl.tail(self.run_dir / METRICS, self.copied)
        self.log_metrics(point for record in records for point in points(record))
        self.copied = end

    def close(self) -> tuple[str | None, str | None]:
        """Log the summary and the artifacts and end the run; return the deep link and a warning."""
        summary = _summary(self.run_dir)
        run_id = self.run.run_id
        # Six digits, so that a cell of MLflow's table shows the whole number.
        self.log_metrics(
            (f"final/{name}", float(f"{value:.6g}"), 0, 0.0) for name, value in finals(summary)
        )
        for key in ("status", "exit_reason"):
            self.client.set_tag(run_id, f"ashl.{key}", str(summary.get(key))[:MAX_TEXT])
        with suppress(Exception):  # the view is that of the latest run
            self.client.set_experiment_tag(
                str(self.experiment),
                view.TAG,
                view.tag(summary["num_workers"], metric=summary.get("metric")),
            )
        warning = None
        try:
            for path in filter(Path.exists, (self.run_dir / name for name in ARTIFACTS)):
                self.client.log_artifact(run_id, str(path))
        except Exception as error:
            warning = warning_of(self.run_dir, f"artifacts: {error}")
        if self.refused:
            warning = warning_of(self.run_dir, f"it refused {', '.join(self.refused)}")
        span = self.span_ms or span_ms(self.run_dir)
        self.client.set_terminated(
            run_id, STATUS.get(summary["status"], "FAILED"), span and span[1]
        )
        if loss := self.loss():
            return None, warning_of(self.run_dir, loss)
        return page_of(self.job["uri"], str(self.experiment)), warning

    def hear(self, line: dict) -> None:
        """Ignore the line: a single run has nothing else to copy."""

    def loss(self) -> str | None:
        """Return what happened to the database if it was deleted or replaced during the run, else
        None.

        SQLite itself may not notice.
        """
        database = stores.database(self.job["uri"])
        if database is None or self.experiment is None or stores.has_run(database, self.run.run_id):
            return None
        return f"{database} was deleted or replaced during the run"

    def _open(self) -> None:
        self.client, experiment = connect(self.job)
        self.begin(experiment)
        _reap(self.client, experiment, self.run.run_id)

    def begin(self, experiment: str) -> None:
        """Create the run."""
        tags = {
            "mlflow.source.name": "ashl",
            "ashl.host": socket.gethostname(),
            "ashl.run_dir": str(self.run_dir),
        }
        started_ms = None if self.span_ms is None else self.span_ms[0]
        self.run = self.client.create_run(
            experiment, started_ms, tags | self.job["tags"], self.job["run_name"]
        ).info
        self.experiment = experiment

    def log_params(self) -> None:
        """Log the parameters that are not logged yet."""
        from mlflow.entities import Param

        while self.params:
            self._log([Param(*item) for item in self.params[:MAX_PARAMS]], measured=False)
            self.params = self.params[MAX_PARAMS:]

    def log_metrics(self, entries: Iterable[tuple[str, float, int, float]]) -> None:
        """Log metrics, each given as name, value, step and host seconds."""
        from mlflow.entities import Metric

        began = self.run.start_time
        batch = [
            Metric(accepted(name), value, began + round(1000 * host_s), step)
            for name, value, step, host_s in entries
        ]
        for first in range(0, len(batch), MAX_METRICS):
            self._log(batch[first : first + MAX_METRICS], measured=True)

    def _log(self, batch: list, *, measured: bool) -> None:
        """Log metrics or parameters; note the names that MLflow refuses."""
        run_id = self.run.run_id
        try:
            if measured:
                self.client.log_batch(run_id, metrics=batch)
            else:
                self.client.log_batch(run_id, params=batch)
        except Exception as error:
            if getattr(error, "error_code", None) != INVALID:
                raise
            if len(batch) == 1:
                self.refused |= {batch[0].key: None}
                return
            half = len(batch) // 2
            self._log(batch[:half], measured=measured)
            self._log(batch[half:], measured=measured)


def connect(job: Mapping) -> tuple["MlflowClient", str]:
    """Return the client of a job's store and the id of its experiment; both are created if
    missing.
    """
    from mlflow import MlflowClient

    with stores.schema_lock(job["uri"]):
        client = MlflowClient(job["uri"])
        return client, _experiment(client, job["experiment"], job["artifacts"])


def page_of(uri: str, experiment: str) -> str:
    """Return the deep link to an experiment, on the store's own server or on that of `ashl ui`."""
    return stores.link(
        stores.public(uri) if stores.database(uri) is None else stores.ADDRESS, experiment
    )


def points(record: dict) -> Iterator[tuple[str, float, int, float]]:
    """Yield name, value, step and host seconds of each metric in a line of metrics.jsonl.

    Only names with a slash are metrics. A null, for example a loss that is no number, is left out.
    `test/acc` comes first, because MLflow makes the first metric the key metric.
    """
    for name in sorted(record, key=lambda name: name != "test/acc"):
        if "/" in name and record[name] is not None:
            yield name, float(record[name]), int(record["step"]), float(record.get("host_s") or 0.0)


def finals(summary: dict) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a summary by name: `test_accuracy`, `best_time_s`, `wait_share_w0`
    and so on.
    """
    for key, value in summary.items():
        if key in ("final", "best"):
            prefix = "" if key == "final" else "best_"
            yield from ((prefix + name, number) for name, number in finals(value or {}))
        elif key == "measures":
            yield from ((f"measure/{name}", found["last"]) for name, found in (value or {}).items())
        elif (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and key not in ("schema", "seed")
        ):
            yield key, float(value)
    if time_s := summary.get("time_s"):
        for rank, worker in enumerate((summary.get("workers") or ())[: view.MAX_WORKERS]):
            yield f"wait_share_w{rank}", worker["wait_s"] / time_s


def _experiment(client: "MlflowClient", name: str, artifacts: str | None) -> str:
    """Return the id of the experiment `name` with the saved view; it is created or restored if
    needed.
    """
    if client.get_experiment_by_name(name) is None:
        try:
            client.create_experiment(name, artifact_location=artifacts)
        except Exception:
            # On a shared server, another process may have created it meanwhile.
            if client.get_experiment_by_name(name) is None:
                raise
    found = client.get_experiment_by_name(name)
    assert found is not None
    if found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
    if view.TAG not in found.tags:
        with suppress(Exception):  # a page without the view is no reason to record nothing
            client.set_experiment_tag(found.experiment_id, view.TAG, view.tag())
    return found.experiment_id


def _reap(client: "MlflowClient", experiment: str, own: str) -> None:
    """End the runs of this host that are still RUNNING although their writer has ended.

    The lock of such a writer is free.
    """
    with suppress(Exception):  # a failed cleanup is no reason to record nothing
        query = f"attributes.status = 'RUNNING' and tags.`ashl.host` = '{socket.gethostname()}'"
        for run in client.search_runs([experiment], query):
            run_dir = Path(run.data.tags["ashl.run_dir"])
            if run.info.run_id != own and not _locked(run_dir / LOG):
                client.set_terminated(
                    run.info.run_id, STATUS.get(_summary(run_dir)["status"], "FAILED")
                )


def _locked(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _summary(run_dir: Path) -> dict:
    try:
        return json.loads((run_dir / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {"status": "failed", "exit_reason": "the run's process ended without a summary"}


def span_ms(run_dir: Path) -> tuple[int, int] | None:
    """Return when a run started and ended, in milliseconds of the epoch; None without a summary.

    The end is the time at which the summary was written. The start follows from `host_s`, the run's
    seconds on this machine.
    """
    try:
        ended_s = (run_dir / SUMMARY).stat().st_mtime
    except OSError:
        return None
    lasted_s = _summary(run_dir).get("host_s") or 0.0
    return round(1000 * (ended_s - lasted_s)), round(1000 * ended_s)


def warning_of(run_dir: Path, reason: str) -> str:
    return (
        f"MLflow did not take all of this run ({stores.gist(reason)}); its records are whole in"
        f" {run_dir}."
    )


if __name__ == "__main__":
    main()
