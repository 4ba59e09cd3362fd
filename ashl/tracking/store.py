"""Find MLflow's store and its pages, without importing MLflow, which takes a second.

MLflow has no file store since 3.13, so the store is SQLite: `mlflow.db` in the folder of the runs,
with `artifacts/` next to it. MLFLOW_TRACKING_URI takes precedence.
"""

import fcntl
import os
import re
import sqlite3
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from ashl.tracking import view

ADDRESS = "http://127.0.0.1:5000"  # address at which `ashl ui` shows a SQLite store
# Opens the page about model training, because MLflow also has one about language models.
TRAINING = "workflowType=machine_learning"
ENVIRONMENT = {  # environment of every MLflow process; the user's own settings take precedence
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # saves eight processes and 1.5 GB
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
}


def tracking_uri(store: Path) -> str:
    """Return the store's URI: MLFLOW_TRACKING_URI, else `mlflow.db` in the folder `store`."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{store.absolute() / 'mlflow.db'}"


def artifact_uri(store: Path) -> str | None:
    """Return the artifact root of new experiments; None if MLFLOW_TRACKING_URI names the store."""
    return (
        None if os.environ.get("MLFLOW_TRACKING_URI") else (store.absolute() / "artifacts").as_uri()
    )


def database(uri: str) -> Path | None:
    """Return the file of a SQLite store; None for any other."""
    prefix = "sqlite:///"
    return Path(uri.removeprefix(prefix)) if uri.startswith(prefix) else None


def public(uri: str) -> str:
    """Return the URI without user name and password."""
    place = urlsplit(uri).netloc
    return uri.replace(place, place.rpartition("@")[2], 1) if "@" in place else uri


def gist(text: str) -> str:
    """Return the cause in an error text: the first sentence of the line that names the error.

    SQLAlchemy has lines before and after it. An address that does not answer is reported as such.
    """
    address = re.search(r"https?://[^/\s]+", text)
    if address and "Max retries exceeded" in text:
        return f"{address[0]} does not answer"
    lines = text.strip().splitlines()
    line = next((line for line in reversed(lines) if "Error" in line), lines[0] if lines else "")
    return line.split(". ")[0].rstrip(".")[:300]


@contextmanager
def schema_lock(uri: str) -> Generator[None, None, None]:
    """Allow one process at a time: processes that create or migrate the same SQLite schema at
    once crash.
    """
    path = database(uri)
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(path.name + ".lock"), "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def has_run(path: Path, run_id: str) -> bool:
    """Return True if the database at `path` has the run, or is locked."""
    try:
        return _first(path, "SELECT 1 FROM runs WHERE run_uuid = ?", run_id) is not None
    except sqlite3.Error as error:
        return "locked" in str(error)


def is_locked(uri: str) -> bool:
    """Return True if another process holds a lock that prevents writing a SQLite store."""
    path = database(uri)
    if path is None or not path.exists():
        return False
    try:
        with closing(_connected(path, timeout_s=0.5)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
    except sqlite3.Error as error:
        return "locked" in str(error)
    return False


def latest(uri: str, address: str = ADDRESS) -> str | None:
    """Return the deep link to the latest experiment of a SQLite store; None without one."""
    path = database(uri)
    query = (
        "SELECT experiment_id FROM runs WHERE lifecycle_stage = 'active' ORDER BY start_time DESC"
        " LIMIT 1"
    )
    try:
        found = _first(path, query) if path else None
    except sqlite3.Error:  # locked, or no store yet
        return None
    return link(address, str(found[0])) if found else None


def page_of(uri: str, folder: Path, address: str) -> str | None:
    """Return the deep link to a run's page or to a sweep's experiment; None if the store has
    neither.
    """
    path, about = (
        database(uri),
        "FROM tags JOIN runs USING (run_uuid) WHERE lifecycle_stage = 'active' AND",
    )
    swept = (folder / "sweep.json").exists()
    key, value = ("ashl.sweep", folder.name) if swept else ("ashl.run_dir", str(folder))
    query = (
        f"SELECT experiment_id, run_uuid {about} key = ? AND value = ? ORDER BY start_time DESC"
        " LIMIT 1"
    )
    try:
        found = _first(path, query, key, value) if path else None
    except sqlite3.Error:
        return None
    if found is None:
        return None
    experiment, run = map(str, found)
    page = f"{address.rstrip('/')}/#/experiments/{experiment}/runs/{run}?{TRAINING}"
    return link(address, experiment) if swept else page


def link(address: str, experiment: str) -> str:
    """Return the deep link to the saved view of an experiment; MLflow opens on language models
    otherwise.
    """
    query = f"{TRAINING}&compareRunsMode=CHART&viewStateShareKey={view.KEY}"
    return f"{address.rstrip('/')}/#/experiments/{experiment}/runs?{query}"


def _first(path: Path, query: str, *values: str) -> tuple | None:
    if not path.exists():
        return None
    with closing(_connected(path, timeout_s=1.0)) as connection:
        return connection.execute(query, values).fetchone()


def _connected(path: Path, timeout_s: float) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode=rw"
    return sqlite3.connect(uri, uri=True, timeout=timeout_s, isolation_level=None)
