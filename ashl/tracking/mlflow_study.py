"""Copy a sweep to MLflow: an experiment with a parent run for the sweep and a run for each of its
runs.

With several seeds, each setting has a run between both levels, with the medians over its seeds.

`python -m ashl.tracking.mlflow_study FOLDER` is the writer's process (see `ashl.tracking.mlflow`).
Its input begins with the sweep, then has a line for each run that has ended. Runs that MLflow has
already are not copied again. So a resumed sweep sends all its runs, and what a deleted or locked
store lacks is copied then.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

from ashl.tracking import jsonl, mlflow, view
from ashl.tracking.recorder import METRICS, SUMMARY

SWEEP = "sweep.json"
DROPPED = "ashl.dropped"  # tag: why a race has dropped a run or a setting
ARTIFACTS = (SWEEP, "leaderboard.md", "report.html", "figures")
MODULE = "ashl.tracking.mlflow_study"
# Tag: the outcome with which a run was copied; of a setting, the outcomes of its runs.
WRITER = "ashl.run.summary"
LATE = "time_to_target_s"  # a missing time counts as later than all others
ENOUGH = 10_000  # most runs of one sweep


def start(
    folder: Path, *, store: Path, name: str, axes: Sequence[str], command: str
) -> mlflow.Writer:
    """Start to copy the sweep in `folder`; returns at once and never raises."""
    tags = {"ashl.kind": "sweep", "ashl.sweep": folder.name, "mlflow.note.content": f"`{command}`"}
    tags |= {"ashl.axes": json.dumps(list(axes))}
    return mlflow.start(
        folder, store=store, experiment=name, run_name=name, params={}, tags=tags, module=MODULE
    )


def add(
    writer: mlflow.Writer, run_dir: Path, run_name: str, config: Mapping, setting: str = ""
) -> None:
    """Report a run that has ended; `setting` is the label without the seed, "" with one seed
    only.
    """
    line = {"run_dir": str(run_dir.absolute()), "run_name": run_name, "setting": setting}
    mlflow.send_line(writer, line | {"params": mlflow.flat(config)})


def main() -> None:
    mlflow.serve(Study)


class Study:
    """The MLflow side of one sweep; a method that failed may be called again."""

    def __init__(self, folder: Path, job: dict):
        self.run_dir, self.job = folder, job
        self.own = mlflow.Copy(folder, job)  # the sweep's run in MLflow, parent of the others
        self.judged: dict = {}  # metric of the task, and whether lower is better
        self.warning: str | None = None  # what failed when a run was copied
        self.waiting: list[dict] = []
        # (run id, outcome) of runs and settings, by name
        self.known: dict[str, tuple[str, str]] = {}
        self.settings: dict[str, dict[str, dict]] = {}  # lines of each setting, by the run's name
        self.lines: dict[str, dict] = {}  # lines by hash

    def hear(self, line: dict) -> None:
        """Note a run that has ended."""
        self.waiting.append(line)
        self.lines[Path(line["run_dir"]).name] = line
        if line["setting"]:
            self.settings.setdefault(line["setting"], {})[line["run_name"]] = line

    def loss(self) -> str | None:
        return self.own.loss()

    def advance(self) -> None:
        """Copy the noted runs."""
        if self.own.experiment is None:
            self.open()
        while self.waiting:
            self.copy(self.waiting[0])
            self.waiting.pop(0)

    def open(self) -> None:
        """Find the sweep and its runs in MLflow, or create the sweep."""
        self.client, self.experiment = mlflow.connect(self.job)
        self.own.client = self.client
        found = self.client.search_runs(
            [self.experiment], f"tags.`ashl.sweep` = '{self.run_dir.name}'"
        )
        if not found:
            self.own.begin(self.experiment)
            return
        for run in self.client.search_runs(
            [self.experiment], "tags.`ashl.kind` != 'sweep'", max_results=ENOUGH
        ):
            self.known[str(run.info.run_name)] = (run.info.run_id, run.data.tags.get(WRITER, ""))
        self.own.run, self.own.experiment = found[0].info, self.experiment

    def copy(self, line: dict) -> None:
        """Copy a run that has ended, with its metrics, outcome and files, in place of an earlier
        copy.
        """
        run_dir, name = Path(line["run_dir"]), line["run_name"]
        summary = (run_dir / SUMMARY).read_bytes()
        record = json.loads(summary)
        self.judged = {
            "metric": record.get("metric"),
            "lower": record.get("higher_is_better") is False,
        }
        outcome = hashlib.sha256(summary).hexdigest()[:16]
        known, copied = self.known.get(name, ("", ""))
        if copied == outcome:
            return
        child = self.replaced(known, name, "run", line["params"], run_dir)
        child.advance()
        _, warning = child.close()
        if warning is None:  # else the next sweep copies it again
            self.mark_copied(child, outcome)
        self.warning = self.warning or warning

    def tag_dropped(self) -> None:
        """Tag the runs that a race has dropped, and their settings, with the reason."""
        record = jsonl.whole(self.run_dir / SWEEP) or {}
        axes = {
            one["hash"]: {k: v for k, v in one["axes"].items() if k != "seed"}
            for one in record.get("settings", ())
        }
        for entry in record.get("dropped", ()):
            same = [
                line for own, line in self.lines.items() if axes.get(own) == axes.get(entry["hash"])
            ]
            names = {line["setting"] for line in same}
            names |= {self.lines[own]["run_name"] for own in self.lines.keys() & {entry["hash"]}}
            for name in names & self.known.keys():
                self.client.set_tag(self.known[name][0], DROPPED, entry["reason"])

    def replaced(
        self,
        known: str,
        name: str,
        kind: str,
        params: dict[str, str],
        run_dir: Path,
        span_ms: tuple[int, int] | None = None,
    ) -> mlflow.Copy:
        """Create a run below the sweep, in place of the known one."""
        if known:
            self.client.delete_run(known)
        tags = {"mlflow.parentRunId": self.own.run.run_id, "ashl.kind": kind}
        child = mlflow.Copy(run_dir, self.job | {"run_name": name, "params": params, "tags": tags})
        child.client = self.client
        child.span_ms = child.span_ms or span_ms
        child.begin(self.experiment)
        self.known[name] = (child.run.run_id, "")
        return child

    def mark_copied(self, child: mlflow.Copy, outcome: str) -> None:
        """Tag a run as completely copied."""
        self.client.set_tag(child.run.run_id, WRITER, outcome)
        self.known[str(child.run.run_name)] = (child.run.run_id, outcome)

    def settle(self, name: str, lines: Sequence[dict]) -> None:
        """Create a setting's run: common parameters and medians over its seeds, with its runs
        below.
        """
        runs = [self.known[line["run_name"]] for line in lines]
        outcome = hashlib.sha256("".join(outcome for _, outcome in runs).encode()).hexdigest()[:16]
        known, settled = self.known.get(name, ("", ""))
        if settled == outcome:
            return
        first, *others = (line["params"] for line in lines)
        params = {
            key: value
            for key, value in first.items()
            if all(other.get(key) == value for other in others)
        }
        seeds = ", ".join(line["params"]["seed"] for line in lines)
        folders = [Path(line["run_dir"]) for line in lines]
        spans = [span for folder in folders if (span := mlflow.span_ms(folder))]
        span = min(start for start, _ in spans), max(end for _, end in spans)
        parent = self.replaced(known, name, "setting", params | {"seed": seeds}, self.run_dir, span)
        parent.log_params()
        summaries = [
            json.loads((folder / SUMMARY).read_text(encoding="utf-8")) for folder in folders
        ]
        ends = middle([dict(mlflow.finals(summary)) for summary in summaries])
        rows = zip(*(jsonl.tail(folder / METRICS, 0)[0] for folder in folders), strict=False)
        parent.log_metrics(point for row in rows for point in mlflow.points(middle(row)))
        parent.log_metrics(
            (f"final/{key}", float(f"{value:.6g}"), 0, 0.0) for key, value in ends.items()
        )
        note = (
            f"Medians over the seeds {seeds}; of a curve, of their evaluations by number, as far as"
            " all of them went."
        )
        self.client.set_tag(parent.run.run_id, "mlflow.note.content", note)
        for run, _ in runs:
            self.client.set_tag(run, "mlflow.parentRunId", parent.run.run_id)
        self.client.set_terminated(parent.run.run_id, end_time=span[1])
        self.mark_copied(parent, outcome)

    def close(self) -> tuple[str | None, str | None]:
        """Log settings and files, end the sweep and set the view; return the link and a warning."""
        for name, lines in self.settings.items():
            self.settle(name, list(lines.values()))
        self.tag_dropped()
        parent = self.own.run.run_id
        for path in filter(Path.exists, (self.run_dir / name for name in ARTIFACTS)):
            log = self.client.log_artifacts if path.is_dir() else self.client.log_artifact
            log(parent, str(path), *([path.name] if path.is_dir() else []))
        with suppress(Exception):  # a page without the view is no reason to record nothing
            axes = json.loads(self.job["tags"]["ashl.axes"])
            self.client.set_experiment_tag(
                self.experiment,
                view.TAG,
                view.tag(axes=axes, settings=bool(self.settings), **self.judged),
            )
        self.client.set_terminated(parent)
        return mlflow.page_of(self.job["uri"], self.experiment), self.warning


def middle(found: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """Return the median of each number that all of them have.

    A time to target also has a median if some did not reach the target.

    >>> middle([{"a": 1.0, LATE: 3.0}, {"a": 3.0}, {"a": 4.0, LATE: 5.0}])
    {'a': 3.0, 'time_to_target_s': 5.0}
    """
    names = dict.fromkeys(
        name for one in found for name, value in one.items() if isinstance(value, int | float)
    )
    middles = {}
    for name in names:
        own = [one.get(name, math.inf if name == LATE else None) for one in found]
        known = [float(value) for value in own if value is not None]
        if len(known) == len(own) and math.isfinite(value := median(known)):
            middles[name] = value
    return middles


if __name__ == "__main__":
    main()
