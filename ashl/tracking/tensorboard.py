"""Show runs in TensorBoard: event files in the folder `tensorboard` of each run folder.

TensorBoard names a run by its folder, so the files are in a folder of the run's name there.
"""

import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ashl.tracking.tracker import Point, TrackedRun, shell_command

EVENTS = "tensorboard"  # folder
OUTCOME = "outcome"  # file: hash of the summary that was copied


class TensorboardTracker:
    """The copy of one run for TensorBoard, which reads its files and needs no server."""

    def has(self, run: TrackedRun, outcome: str) -> bool:
        marker = run.folder / EVENTS / OUTCOME
        return marker.exists() and marker.read_text() == outcome

    def open(self, run: TrackedRun) -> str:
        from torch.utils.tensorboard import SummaryWriter

        self.folder = run.folder
        # all runs of a sweep are below its folder
        self.shown = run.folder if run.kind == "sweep" else run.folder / EVENTS
        self.started_s = time.time()
        self.params = dict(run.params)
        self.ends: dict[str, float] = {}
        shutil.rmtree(run.folder / EVENTS, ignore_errors=True)  # of an earlier, incomplete copy
        name = re.sub(r"[^\w.=-]", "_", run.name)
        self.writer = SummaryWriter(str(run.folder / EVENTS / name))
        self.writer.add_text(run.name, run.note)
        return str(run.folder)

    def log_metrics(self, points: Sequence[Point]) -> None:
        for name, value, step, host_s in points:
            if name.startswith("final/"):
                self.ends[name] = value
            else:
                self.writer.add_scalar(name, value, step, self.started_s + host_s)
        self.writer.flush()

    def log_artifact(self, path: Path) -> None:
        """Do nothing: the file is already next to the event files."""

    def close(self, summary: Mapping[str, Any], outcome: str) -> str:
        if self.params:  # a row in TensorBoard's table of hyperparameters
            self.writer.add_hparams(self.params, self.ends, run_name=".")
        self.writer.add_text("status", str(summary["status"]))
        self.writer.close()
        (self.folder / EVENTS / OUTCOME).write_text(outcome)
        return shell_command("tensorboard", "--logdir", self.shown)
