"""A sweep in MLflow: an experiment of its own, a parent run for the sweep and one below it for each of its runs.

`python -m ashl.tracking.mlflow_study FOLDER` is the writer's process (see `ashl.tracking.mlflow`): its input begins
with the sweep, then a line for each run that has ended. Runs that are there already are not copied again, so a sweep
that is taken up tells of all its runs, and what a deleted or locked store has lost is there afterwards.
"""

import fcntl
import hashlib
import json
import os
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ashl.tracking import mlflow, view
from ashl.tracking import store as stores
from ashl.tracking.recorder import SUMMARY

ARTIFACTS = ("sweep.json", "leaderboard.md", "report.html", "figures")
MODULE = "ashl.tracking.mlflow_study"
WRITER = "ashl.summary"  # the tag that says which outcome a run was copied with
ENOUGH = 10_000  # runs of one sweep


def start(folder: Path, *, store: Path, name: str, axes: Sequence[str], command: str) -> mlflow.Writer:
    """Begin to copy the sweep in `folder`; returns at once and never raises."""
    tags = {"ashl.kind": "sweep", "ashl.sweep": folder.name, "mlflow.note.content": f"`{command}`"}
    tags |= {"ashl.axes": json.dumps(list(axes))}
    return mlflow.start(folder, store=store, experiment=name, run_name=name, params={}, tags=tags, module=MODULE)


def add(writer: mlflow.Writer, run_dir: Path, run_name: str, config: Mapping) -> None:
    """A run has ended."""
    mlflow.tell(writer, {"run_dir": str(run_dir.absolute()), "run_name": run_name, "params": mlflow.flat(config)})


def main() -> None:
    os.nice(10)  # the runs come first
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever MLflow prints belongs in the log
    folder = Path(sys.argv[1])
    job = json.loads(sys.stdin.readline())
    with open(folder / mlflow.LOG, "ab") as log, answer:
        fcntl.flock(log, fcntl.LOCK_EX)
        json.dump(follow(Study(folder, job)), answer)


def follow(study: "Study") -> tuple[str | None, str | None]:
    """Copy what has ended until the input is closed, trying again after each failure; (deep link, warning)."""
    ended = False
    while True:
        try:
            study.advance()
            if ended:
                return study.close(), None
        except Exception as error:  # MLflow and its stores fail in too many ways to name them
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            if ended:
                return None, mlflow.warning_of(study.folder, str(error))
        while not ended and select.select([sys.stdin], [], [], mlflow.PERIOD_S)[0]:
            line = sys.stdin.readline()
            ended = not line
            if line:
                study.waiting.append(json.loads(line))
            else:
                signal.alarm(mlflow.LAST_WORDS_S)


class Study:
    """The MLflow side of one sweep. What failed may be called again."""

    def __init__(self, folder: Path, job: dict):
        self.folder, self.job = folder, job
        self.waiting: list[dict] = []
        self.parent: str | None = None
        self.known: dict[str, tuple[str, str]] = {}  # (run id, outcome) by configuration

    def advance(self) -> None:
        """Copy what waits."""
        if self.parent is None:
            self.open()
        while self.waiting:
            self.copy(self.waiting[0])
            self.waiting.pop(0)

    def open(self) -> None:
        """Find the sweep and its runs, or make it."""
        self.client, self.experiment = mlflow.connect(self.job)
        found = self.client.search_runs([self.experiment], f"tags.`ashl.sweep` = '{self.folder.name}'")
        own = mlflow.Copy(self.folder, self.job)
        own.client = self.client
        if found:
            parent = found[0].info.run_id
            for run in self.client.search_runs(
                [self.experiment], f"tags.`mlflow.parentRunId` = '{parent}'", max_results=ENOUGH
            ):
                self.known[str(run.info.run_name)] = (run.info.run_id, run.data.tags.get(WRITER, ""))
        else:
            own.begin(self.experiment)
            parent = own.run.run_id
        self.parent = parent

    def copy(self, line: dict) -> None:
        """One run that has ended, with its metrics, outcome and files; what is there of it already is replaced."""
        run_dir, name = Path(line["run_dir"]), line["run_name"]
        outcome = hashlib.sha256((run_dir / SUMMARY).read_bytes()).hexdigest()[:16]
        known, copied = self.known.get(name, ("", ""))
        if copied == outcome:
            return
        if known:
            self.client.delete_run(known)
        tags = {"mlflow.parentRunId": str(self.parent), "ashl.kind": "run"}
        child = mlflow.Copy(run_dir, self.job | {"run_name": name, "params": line["params"], "tags": tags})
        child.client = self.client
        child.begin(self.experiment)
        self.known[name] = (child.run.run_id, "")
        child.advance()
        child.close()
        self.client.set_tag(child.run.run_id, WRITER, outcome)
        self.known[name] = (child.run.run_id, outcome)

    def close(self) -> str:
        """The sweep's own files, its end, and the view on its experiment; returns the deep link."""
        assert self.parent is not None
        for path in filter(Path.exists, (self.folder / name for name in ARTIFACTS)):
            log = self.client.log_artifacts if path.is_dir() else self.client.log_artifact
            log(self.parent, str(path), *([path.name] if path.is_dir() else []))
        with suppress(Exception):  # a plainer page is no reason to record nothing
            axes = json.loads(self.job["tags"]["ashl.axes"])
            self.client.set_experiment_tag(self.experiment, view.TAG, view.tag(axes=axes))
        self.client.set_terminated(self.parent)
        uri = self.job["uri"]
        return stores.link(stores.public(uri) if stores.database(uri) is None else stores.ADDRESS, self.experiment)


if __name__ == "__main__":
    main()
