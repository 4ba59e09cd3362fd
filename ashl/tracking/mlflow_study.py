"""A sweep in MLflow: an experiment of its own, a parent run for the sweep and one below it for each of its runs.

`python -m ashl.tracking.mlflow_study FOLDER` is the writer's process (see `ashl.tracking.mlflow`): its input begins
with the sweep, then a line for each run that has ended. Runs that are there already are not copied again, so a sweep
that is taken up tells of all its runs, and what a deleted or locked store has lost is there afterwards.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ashl.tracking import mlflow, view
from ashl.tracking.recorder import SUMMARY

ARTIFACTS = ("sweep.json", "leaderboard.md", "report.html", "figures")
MODULE = "ashl.tracking.mlflow_study"
WRITER = "ashl.run.summary"  # the tag that says which outcome a run was copied with
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
    mlflow.serve(Study)


class Study:
    """The MLflow side of one sweep. What failed may be called again."""

    def __init__(self, folder: Path, job: dict):
        self.run_dir, self.job = folder, job
        self.own = mlflow.Copy(folder, job)  # the sweep's run in MLflow, above the others
        self.warning: str | None = None  # what a run was not copied with
        self.waiting: list[dict] = []
        self.known: dict[str, tuple[str, str]] = {}  # (run id, outcome) by configuration

    def hear(self, line: dict) -> None:
        """A run has ended."""
        self.waiting.append(line)

    def loss(self) -> str | None:
        return self.own.loss()

    def advance(self) -> None:
        """Copy what waits."""
        if self.own.experiment is None:
            self.open()
        while self.waiting:
            self.copy(self.waiting[0])
            self.waiting.pop(0)

    def open(self) -> None:
        """Find the sweep and its runs, or make it."""
        self.client, self.experiment = mlflow.connect(self.job)
        self.own.client = self.client
        found = self.client.search_runs([self.experiment], f"tags.`ashl.sweep` = '{self.run_dir.name}'")
        if not found:
            self.own.begin(self.experiment)
            return
        below = f"tags.`mlflow.parentRunId` = '{found[0].info.run_id}'"
        for run in self.client.search_runs([self.experiment], below, max_results=ENOUGH):
            self.known[str(run.info.run_name)] = (run.info.run_id, run.data.tags.get(WRITER, ""))
        self.own.run, self.own.experiment = found[0].info, self.experiment

    def copy(self, line: dict) -> None:
        """One run that has ended, with its metrics, outcome and files; what is there of it already is replaced."""
        run_dir, name = Path(line["run_dir"]), line["run_name"]
        outcome = hashlib.sha256((run_dir / SUMMARY).read_bytes()).hexdigest()[:16]
        known, copied = self.known.get(name, ("", ""))
        if copied == outcome:
            return
        if known:
            self.client.delete_run(known)
        tags = {"mlflow.parentRunId": self.own.run.run_id, "ashl.kind": "run"}
        child = mlflow.Copy(run_dir, self.job | {"run_name": name, "params": line["params"], "tags": tags})
        child.client = self.client
        child.begin(self.experiment)
        self.known[name] = (child.run.run_id, "")
        child.advance()
        _, warning = child.close()
        if warning is None:  # else the next sweep copies it again
            self.client.set_tag(child.run.run_id, WRITER, outcome)
            self.known[name] = (child.run.run_id, outcome)
        self.warning = self.warning or warning

    def close(self) -> tuple[str | None, str | None]:
        """The sweep's own files, its end, and the view on its experiment; returns the deep link and a warning."""
        parent = self.own.run.run_id
        for path in filter(Path.exists, (self.run_dir / name for name in ARTIFACTS)):
            log = self.client.log_artifacts if path.is_dir() else self.client.log_artifact
            log(parent, str(path), *([path.name] if path.is_dir() else []))
        with suppress(Exception):  # a plainer page is no reason to record nothing
            axes = json.loads(self.job["tags"]["ashl.axes"])
            self.client.set_experiment_tag(self.experiment, view.TAG, view.tag(axes=axes))
        self.client.set_terminated(parent)
        return mlflow.page_of(self.job["uri"], self.experiment), self.warning


if __name__ == "__main__":
    main()
