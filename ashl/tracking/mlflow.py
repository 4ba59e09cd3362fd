"""Show runs in MLflow; only this module imports mlflow, inside functions that a thread calls.

MLflow has no file store since 3.13, so the store is SQLite: `mlflow.db` in the folder of the runs,
with `artifacts/` next to it. MLFLOW_TRACKING_URI takes precedence. MLflow itself waits for
locks of SQLite.
"""

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ashl.tracking import jsonl
from ashl.tracking.recorder import SUMMARY
from ashl.tracking.tracker import Point, TrackedRun, shell_command

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment, Run

STATUS = {"finished": "FINISHED", "interrupted": "KILLED"}  # others are FAILED
# MLflow's limits: characters of a value and of a name.
MAX_TEXT = 5000
MAX_NAME = 250
ENVIRONMENT = {  # settings of MLflow; the user's own take precedence
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # saves eight processes and 1.5 GB
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",  # one warning says what failed
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    # A connection for each transaction: an open one would not notice a deleted database.
    "MLFLOW_SQLALCHEMYSTORE_POOLCLASS": "NullPool",
}
SQLITE = "sqlite:///"
# Opens the page about model training, because MLflow also has one about language models.
TRAINING = "workflowType=machine_learning"
BY_NAME = "orderByKey=tags.%60mlflow.runName%60&orderByAsc=true"
FOLDER, OUTCOME = "ashl.folder", "ashl.outcome"  # tags: hashes of a run's folder and summary


class MlflowTracker:
    """The copy of one run in MLflow. Args: store is the folder of `mlflow.db`."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.client = client_of(store)
        self.run: Run
        self.tracked: TrackedRun

    def has(self, run: TrackedRun, outcome: str) -> bool:
        tags = {FOLDER: folder_tag(run.folder), OUTCOME: outcome}
        return bool(find_runs(self.client, self.client.search_experiments(), tags))

    def open(self, run: TrackedRun) -> str:
        """Begin a run; earlier copies that are incomplete, or of a sweep's run, are deleted.

        A sweep continues its own run.
        """
        experiment = get_or_create_experiment(self.client, run.experiment, self.store)
        self.tracked = run
        for earlier in find_runs(self.client, [experiment], {FOLDER: folder_tag(run.folder)}):
            if run.kind == "sweep":
                self.client.update_run(earlier.info.run_id, status="RUNNING")
                self.run = earlier
                return earlier.info.run_id
            if run.parent or earlier.info.status == "RUNNING":
                self.client.delete_run(earlier.info.run_id)
        tags = {
            "mlflow.source.name": "ashl",
            "mlflow.note.content": run.note[:MAX_TEXT],
            "ashl.kind": run.kind,
            "ashl.run_dir": str(run.folder),
            FOLDER: folder_tag(run.folder),
            **({"mlflow.parentRunId": run.parent} if run.parent else {}),
            **{key: value[:MAX_TEXT] for key, value in run.tags.items()},
        }
        span = span_ms(run.folder)
        self.run = self.client.create_run(
            experiment.experiment_id, span[0] if span else None, tags, run.name
        )
        self._log_params(run.params)
        return self.run.info.run_id

    def _log_params(self, params: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        found: dict[str, str] = {}
        for name, value in params.items():
            key = sanitize_name(name)
            count = 1
            while key in found:  # two names that differ in characters that MLflow refuses
                count += 1
                key = f"{sanitize_name(name)}_{count}"
            found[key] = value[:MAX_TEXT]
        batch = [Param(key, value) for key, value in found.items()]
        self.client.log_batch(self.run.info.run_id, params=batch)

    def log_metrics(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        start_ms = self.run.info.start_time
        batch = [
            Metric(sanitize_name(name), value, start_ms + round(1000 * host_s), step)
            for name, value, step, host_s in points
        ]
        self.client.log_batch(self.run.info.run_id, metrics=batch)

    def log_artifact(self, path: Path) -> None:
        self.client.log_artifact(self.run.info.run_id, str(path))

    def close(self, summary: Mapping[str, Any], outcome: str) -> str:
        from mlflow.entities import RunTag

        run_id = self.run.info.run_id
        reason = str(summary.get("exit_reason"))[:MAX_TEXT]
        tags = {"ashl.status": summary["status"], "ashl.exit_reason": reason, OUTCOME: outcome}
        self.client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])
        span = span_ms(self.tracked.folder)
        status = STATUS.get(summary["status"], "FAILED")
        self.client.set_terminated(run_id, status, span[1] if span else None)
        uri = tracking_uri(self.store)
        if uri.startswith("http"):
            return experiment_page(without_credentials(uri), self.run.info.experiment_id)
        return shell_command("ashl", "ui", self.tracked.folder)


def experiment_page(address: str, experiment: str) -> str:
    """Return the link to an experiment's runs and their charts.

    The runs are sorted by name, because MLflow shows no chart of a sweep's runs in its own order.
    """
    page = f"{address.rstrip('/')}/#/experiments/{experiment}/runs"
    return f"{page}?{TRAINING}&compareRunsMode=CHART&{BY_NAME}"


def tracking_uri(store: Path) -> str:
    """Return the store's URI: MLFLOW_TRACKING_URI, else `mlflow.db` in the folder `store`."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"{SQLITE}{store.absolute() / 'mlflow.db'}"


def without_credentials(uri: str) -> str:
    """Return the URI without user name and password."""
    return re.sub(r"//[^/@\s]+@", "//", uri)


def set_environment(store: Path) -> None:
    """Set MLflow's variables, in the main thread: other threads may read the environment."""
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        # Root of MLflow's default experiment: a path with quotes would break its SQL.
        os.environ["_MLFLOW_SERVER_ARTIFACT_ROOT"] = artifact_root(store)


def client_of(store: Path) -> "MlflowClient":
    """Return a client of the store, which is created if it is missing."""
    from mlflow import MlflowClient

    uri = tracking_uri(store)
    path = Path(uri.removeprefix(SQLITE))
    if uri.startswith(SQLITE) and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # As a whole or not at all: processes that create the schema of one database at once fail.
        part = path.with_name(f"{path.name}.{os.getpid()}")
        MlflowClient(f"{SQLITE}{part}")
        with suppress(FileExistsError):
            os.link(part, path)
        part.unlink()
    return MlflowClient(uri)


def artifact_root(store: Path) -> str:
    return (store.absolute() / "artifacts").as_uri()


def get_or_create_experiment(client: "MlflowClient", name: str, store: Path) -> "Experiment":
    """Return the experiment `name`; it is created or restored if needed."""
    if client.get_experiment_by_name(name) is None:
        local = not os.environ.get("MLFLOW_TRACKING_URI")
        with suppress(Exception):  # another process may have created it meanwhile
            client.create_experiment(
                name, artifact_location=artifact_root(store) if local else None
            )
    found = client.get_experiment_by_name(name)
    if found is None:
        raise RuntimeError(f"the experiment {name} cannot be created")
    if found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
    return found


def find_runs(
    client: "MlflowClient", experiments: Sequence["Experiment"], tags: Mapping[str, str]
) -> Sequence["Run"]:
    """Find the runs with these tags, the latest first."""
    query = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
    ids = [experiment.experiment_id for experiment in experiments]
    return client.search_runs(ids, query, order_by=["attributes.start_time DESC"])


def folder_tag(folder: Path) -> str:
    """Return a hash of a folder's path, which may hold characters that a query cannot."""
    return hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:16]


def sanitize_name(name: str) -> str:
    """Make a name that MLflow accepts: other characters become underscores.

    No part of a path is empty or consists of dots.

    >>> sanitize_name("measure/top@5 (all)"), sanitize_name("a//../b")
    ('measure/top_5 _all_', 'a/_/_/b')
    """
    parts = re.sub(r"[^A-Za-z0-9_./ :-]", "_", name).split("/")
    return "/".join(part if part.strip(".") else "_" for part in parts)[:MAX_NAME]


def span_ms(folder: Path) -> tuple[int, int] | None:
    """Return when a run started and ended, in milliseconds of the epoch; None without a summary.

    The end is the time at which the summary was written. The start follows from `host_s`, the run's
    seconds on this machine.
    """
    summary = jsonl.read_json(folder / SUMMARY)
    if summary is None:
        return None
    ended_s = (folder / SUMMARY).stat().st_mtime
    return round(1000 * (ended_s - (summary.get("host_s") or 0.0))), round(1000 * ended_s)
