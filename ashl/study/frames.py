"""Read finished runs for notebooks: their records as pandas frames, and their models."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from ashl.config.session import Session
from ashl.errors import UsageError, load_json
from ashl.report import export, records
from ashl.report.records import SWEEP, BrokenRecordError, LeftOut, Study
from ashl.tracking import jsonl

if TYPE_CHECKING:
    from pandas import DataFrame
    from torch import nn


@dataclass(frozen=True, eq=False, repr=False)
class Run(Mapping[str, Any]):
    """A run folder, as a mapping of its summary and `run_dir`.

    The mapping is empty in a process of a job that does not record.
    """

    folder: Path
    summary: Mapping[str, Any]  # content of summary.json
    allowed: Sequence[str] = ()  # packages that the caller of `ashl.train` allowed
    session: Session = field(default_factory=Session)  # the objects that the caller passed

    @cached_property
    def metrics(self) -> "DataFrame":
        """A row for each evaluation, by time. Raises UsageError."""
        return self._frame("metrics.jsonl")

    @cached_property
    def events(self) -> "DataFrame":
        """A row for each event: rounds with their spans, merges, worker failures. Raises
        UsageError.
        """
        return self._frame("events.jsonl")

    @cached_property
    def plan(self) -> Mapping[str, Any]:
        """The content of plan.json. Raises UsageError."""
        try:
            return load_json((self.folder / "plan.json").read_bytes())
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{self.folder / 'plan.json'} is missing or broken; run it again."
            ) from error

    def model(
        self, weights: Literal["final", "best"] = "final", allow_targets: Sequence[str] = ()
    ) -> "nn.Module":
        """Return the model with the weights that the run saved, ready to evaluate; it needs no data
        set.

        Args: allow_targets are packages from which a model of your own may be imported. Packages
        that `ashl.train` allowed and classes that are imported already need no entry.
        Raises: UsageError if the run saved no weights.
        """
        from ashl.run.weights import load

        with self.session.expose_objects():
            return load(self.folder, weights, (*allow_targets, *self.allowed))

    def _frame(self, name: str) -> "DataFrame":
        from pandas import DataFrame

        try:
            return DataFrame.from_records(list(jsonl.read(self.folder / name)))
        except (OSError, ValueError) as error:
            kept = "; tracking.events=all keeps it" if name == "events.jsonl" else ""
            raise UsageError(f"{self.folder / name} is missing or broken{kept}.") from error

    @property
    def _name(self) -> str:
        """The name of the run; that of its folder if its process died before its end."""
        return self.summary.get("name", self.folder.name)

    @cached_property
    def _items(self) -> dict[str, Any]:
        return {**self.summary, "run_dir": str(self.folder)} if self.summary else {}

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        if not self.summary:
            return "<Run that another process records>"
        status, time_s = self.summary["status"], self.summary.get("time_s", 0.0)
        return f"<Run {self._name}, {status} after {time_s:.4g} s: {self.folder}>"

    def _repr_html_(self) -> str:
        from pandas import Series

        if not self.summary:
            return escape(repr(self))
        final = {f"final {key}": value for key, value in (self.get("final") or {}).items()}
        shown = ("status", "time_s", "steps", "wait_share", "bytes_up", "time_to_target_s")
        values = Series({key: self.summary.get(key) for key in shown} | final, dtype=object)
        table = values.dropna().to_frame(f"{self._name}: {self.folder}")
        return table.to_html(border=0, float_format="{:.4g}".format)


@dataclass(frozen=True, eq=False, repr=False)
class Runs(Sequence[Run]):
    """The runs of a sweep, in the order of its grid, or of any folder of runs.

    Its frames have the columns of `ashl export`: hash, setting, seed and the axes first.
    """

    study: Study

    @cached_property
    def summary(self) -> "DataFrame":
        """A row for each run, with each worker's values as `w0_wait_s`."""
        return self._frame("summary")

    @cached_property
    def metrics(self) -> "DataFrame":
        """A row for each evaluation of each run. Raises UsageError if there is none."""
        return self._frame("metrics")

    @cached_property
    def events(self) -> "DataFrame":
        """A row for each event of each run, spans as JSON. Raises UsageError if there is none."""
        return self._frame("events")

    def answer(self, target: float | None = None) -> str:
        """Return the sentences of `ashl compare`: the first setting at the target, its lead and its
        certainty.

        `target` is an accuracy; None = the target of the runs, or the best that all of them reach.
        """
        from ashl.report.answer import answer_of
        from ashl.report.leaderboard import rank

        found = answer_of(rank(self.study, target=target))
        return " ".join((found.headline, *found.sentences))

    @property
    def left_out(self) -> Sequence[LeftOut]:
        """Folders and settings without a finished run, with the reason."""
        return self.study.left_out

    def _frame(self, what: str) -> "DataFrame":
        found, bad = export.records_table(self.study, what)
        if bad:
            named = "; ".join(f"{out.name} ({out.reason})" for out in bad)
            warnings.warn(f"left out {named}", stacklevel=3)
        return found.infer_objects()

    @overload
    def __getitem__(self, index: int) -> Run: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Run]: ...
    def __getitem__(self, index: int | slice) -> Run | Sequence[Run]:
        found = self.study.runs[index]
        return [_run(run) for run in found] if isinstance(found, tuple) else _run(found)

    def __len__(self) -> int:
        return len(self.study.runs)

    def __repr__(self) -> str:
        return f"<Runs: {len(self)}" + (f" of {self.study.folder}>" if self.study.folder else ">")

    def _repr_html_(self) -> str:
        shown = ["name", "seed", "status", "time_s", "steps", "wait_share", "time_to_target_s"]
        table = self.summary.reindex(columns=[*shown, "final_test_accuracy"])
        text = table.to_html(border=0, na_rep="", float_format="{:.4g}".format)
        return f"<p>{escape(repr(self)[1:-1])}</p>{text}"


def load(path: Path) -> Run | Runs:
    """Return one run, or all runs of a sweep or of a folder.

    Raises: UsageError if no run there has ended.
    """
    if not path.is_dir() or (path / SWEEP).exists() or not (path / records.CONFIG).exists():
        return Runs(records.read_study([path]))
    try:
        return _run(records.read_run(path))
    except BrokenRecordError as error:
        raise UsageError(f"{path} {error}.") from error


def _run(run: records.Run) -> Run:
    return Run(run.folder, run.summary)
