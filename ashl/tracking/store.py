"""Where MLflow keeps its records, and how to point a person there; without importing MLflow, which
takes a second.

MLflow's file store is gone since 3.13, so the store is SQLite: `mlflow.db` in the folder of the
runs, with `artifacts/` beside it. MLFLOW_TRACKING_URI takes precedence.
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

ADDRESS = "http://127.0.0.1:5000"  # where `ashl ui` shows a SQLite store
# the page about model training, where MLflow has one about language models
TRAINING = "workflowType=machine_learning"
ENVIRONMENT = {  # of every MLflow process that we start; the user's own settings win
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # saves eight processes and 1.5 GB
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
}


def tracking_uri(store: Path) -> str:
    """The store's URI: MLFLOW_TRACKING_URI, else `mlflow.db` in the folder `store`."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{store.absolute() / 'mlflow.db'}"


def artifact_uri(store: Path) -> str | None:
    """Where new experiments keep their artifacts; None leaves it to the store that
    MLFLOW_TRACKING_URI names.
    """
    return (
        None if os.environ.get("MLFLOW_TRACKING_URI") else (store.absolute() / "artifacts").as_uri()
    )


def database(uri: str) -> Path | None:
    """The file of a SQLite store; None for any other."""
    prefix = "sqlite:///"
    return Path(uri.removeprefix(prefix)) if uri.startswith(prefix) else None


def public(uri: str) -> str:
    """The URI without a user's name and password."""
    place = urlsplit(uri).netloc
    return uri.replace(place, place.rpartition("@")[2], 1) if "@" in place else uri


def gist(text: str) -> str:
    """What happened, in the first sentence of the line that says so; SQLAlchemy has lines before it
    and after it, and an address that does not answer comes with all that was tried.
    """
    address = re.search(r"https?://[^/\s]+", text)
    if address and "Max retries exceeded" in text:
        return f"{address[0]} does not answer"
    lines = text.strip().splitlines()
    line = next((line for line in reversed(lines) if "Error" in line), lines[0] if lines else "")
    return line.split(". ")[0].rstrip(".")[:300]


@contextmanager
def schema_lock(uri: str) -> Generator[None, None, None]:
    """One process at a time: those that create or migrate the same SQLite schema at once crash each
    other.
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
    """Whether the database at `path` knows the run. One that is locked is taken to know it."""
    try:
        return _first(path, "SELECT 1 FROM runs WHERE run_uuid = ?", run_id) is not None
    except sqlite3.Error as error:
        return "locked" in str(error)


def is_locked(uri: str) -> bool:
    """Return True if another process holds a lock that keeps a SQLite store from being written."""
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
    """Deep link to the experiment of a SQLite store that ran last; None when nothing ran yet or it
    cannot be read.
    """
    path = database(uri)
    query = (
        "SELECT experiment_id FROM runs WHERE lifecycle_stage = 'active' ORDER BY start_time DESC"
        " LIMIT 1"
    )
    try:
        found = _first(path, query) if path else None
    except sqlite3.Error:  # locked, or not a store yet
        return None
    return link(address, str(found[0])) if found else None


def page_of(uri: str, folder: Path, address: str) -> str | None:
    """Deep link to the page of a run, or to the view of a sweep's experiment; None where the store
    knows neither.
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
    """Deep link to our saved view of an experiment, by id; MLflow itself opens on a page about
    language models.
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
