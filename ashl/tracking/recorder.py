"""The record files of a run folder: events, metrics, trace and summary. One process writes them."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ashl.errors import AshlError, UsageError
from ashl.runtime.records import Rounds
from ashl.tracking import jsonl, timeline

EVENTS, METRICS, TRACE, SUMMARY = "events.jsonl", "metrics.jsonl", "trace.json.gz", "summary.json"

UNWRITABLE = (  # how the sentence about a full or read-only disk begins
    "Cannot write to the run folder"
)


class Recorder:
    """Writer of the record files in `run_dir`, which is made if it is missing.

    `events`: which rounds will come, see `ashl.runtime.records`; `none` keeps no other events
    either. Records are plain dicts; NaN and infinities become null, numpy scalars and arrays become
    numbers and lists. Raises UsageError when the folder already holds a run and AshlError when it
    cannot be written to (read-only, disk full); what was written before stays readable. `sizes` are
    those of an earlier recorder in the same folder: what it wrote after that moment is forgotten,
    and written anew.
    """

    def __init__(self, run_dir: Path, events: Rounds, sizes: Mapping[str, int] | None = None):
        self.run_dir = run_dir
        sizes = sizes or {}
        for name, size in sizes.items():
            found = path.stat().st_size if (path := run_dir / name).exists() else 0
            if found < size or not path.is_file():
                text = (
                    f"{path} has {found:,} bytes, and had {size:,} at the checkpoint: its records"
                    " would have a gap"
                )
                raise UsageError(f"{text}; run this setting again.")
        with writing(run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)
            self._metrics = jsonl.Lines(run_dir / METRICS, sizes.get(METRICS))
            self._events = (
                None if events == "none" else jsonl.Lines(run_dir / EVENTS, sizes.get(EVENTS))
            )
            if sizes:
                (run_dir / SUMMARY).unlink(missing_ok=True)

    def sizes(self) -> dict[str, int]:
        """How much is written, by file."""
        return {METRICS: self._metrics.size} | ({EVENTS: self._events.size} if self._events else {})

    def event(self, record: dict) -> None:
        """Record one round (`kind` = "round") or another event ("stage", "replan", ...) of one
        rank.
        """
        if self._events is not None:
            with writing(self.run_dir):
                self._events.append(record)

    def metric(self, record: dict) -> None:
        """Record one measurement of the run: `time_s`, `host_s`, `step` and so on, and metrics
        named as `test/acc`.
        """
        with writing(self.run_dir):
            self._metrics.append(record)

    def document(self, name: str, text: str) -> None:
        """Write a file beside the records, or write it anew: it holds what it held or all
        of this.
        """
        with writing(self.run_dir):
            jsonl.write_text(self.run_dir / name, text)

    def leave(self) -> None:
        """Close the files where nothing was run."""
        for lines in filter(None, (self._metrics, self._events)):
            lines.close()

    def close(self, summary: dict) -> None:
        """Write the trace and then the summary: who sees `summary.json` finds everything else
        complete.
        """
        self._metrics.close()
        try:
            if self._events is not None:
                self._events.close()
                with writing(self.run_dir):
                    end_s = None if summary.get("status") == "failed" else summary.get("time_s")
                    timeline.write(
                        self.run_dir / EVENTS,
                        self.run_dir / TRACE,
                        summary.get("num_workers"),
                        end_s,
                    )
        finally:  # the summary is worth more than the trace
            with writing(self.run_dir):
                jsonl.write_json(self.run_dir / SUMMARY, summary)


@contextmanager
def writing(run_dir: Path) -> Generator[None, None, None]:
    """Turn what the operating system says into a sentence that names the run folder and the way
    out.
    """
    try:
        yield
    except FileExistsError as error:  # the records of two runs must not mix
        what = "already holds a run" if run_dir.is_dir() else "is a file"
        raise UsageError(f"{run_dir} {what}; choose another run.dir.") from error
    except BlockingIOError as error:
        raise AshlError(
            f"another process is writing the run in {run_dir}; wait for it to end."
        ) from error
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        text = f"{UNWRITABLE} {run_dir} ({reason}); free some space or choose another run.dir."
        raise AshlError(text) from error
