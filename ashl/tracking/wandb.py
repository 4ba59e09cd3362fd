"""Show runs in Weights & Biases, offline: `wandb sync` uploads folder `wandb` of a run folder."""

import hashlib
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from ashl.tracking.tracker import Point, TrackedRun, shell_command

FILES = "wandb"  # folder
OUTCOME = "outcome"  # file: hash of the summary that was copied


class WandbTracker:
    """The offline copy of one run; nothing reaches the network."""

    def has(self, run: TrackedRun, outcome: str) -> bool:
        marker = run.folder / FILES / OUTCOME
        return marker.exists() and marker.read_text() == outcome

    def open(self, run: TrackedRun) -> str:
        import wandb

        self.folder = run.folder
        self.run = wandb.init(
            mode="offline",
            dir=run.folder,
            project=run.experiment,
            group=run.parent,
            name=run.name,
            id=hashlib.sha256(str(run.folder).encode()).hexdigest()[:16],
            config=dict(run.params),
            notes=run.note,
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off", disable_git=True),
        )
        self.run.define_metric("*", step_metric="time/s")  # the run's own clock
        return run.name

    def log_metrics(self, points: Sequence[Point]) -> None:
        """Log each evaluation in one call; the numbers of the outcome become W&B's summary."""
        for (step, _), row in groupby(points, key=lambda point: (point.step, point.host_s)):
            values = {point.name: point.value for point in row}
            if any(name.startswith("final/") for name in values):
                self.run.summary.update(values)
            else:
                self.run.log(values | {"step": step})

    def log_artifact(self, path: Path) -> None:
        self.run.save(str(path), base_path=str(path.parent), policy="now")

    def close(self, summary: Mapping[str, Any], outcome: str) -> str:
        self.run.summary["status"] = summary["status"]
        self.run.finish(exit_code=0 if summary["status"] == "finished" else 1)
        (self.folder / FILES / OUTCOME).write_text(outcome)
        return shell_command("wandb", "sync", Path(self.run.dir).parent)
