"""Write the record files of a run folder: events, metrics, trace and summary; one process writes
them.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ashl.errors import AshlError, UsageError, unwritable_path_error
from ashl.runtime.records import Rounds
from ashl.tracking import jsonl, timeline

EVENTS, METRICS, TRACE, SUMMARY = "events.jsonl", "metrics.jsonl", "trace.json.gz", "summary.json"
SWEEP = "sweep.json"  # the record of a sweep, in its own folder

# Beginning of the message about a full or read-only disk.
UNWRITABLE = "Cannot write to the run folder"


class Recorder:
    """The writer of the record files in `run_dir`, which is created if it is missing.

    Records are plain dicts; NaN and infinities become null, numpy scalars and arrays become numbers
    and lists. On a failure, everything written before stays readable.

    Args: events says which rounds are recorded (see `ashl.runtime.records`); `none` records no
    other events either. sizes are those of an earlier recorder in the same folder; what it wrote
    later is removed and written again.
    Raises: UsageError if the folder already holds a run or a sweep; AshlError if it cannot be
    written to.
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
        with writing(run_dir, begins=True):
            if (run_dir / SWEEP).is_file():  # the runs of a sweep have folders of their own
                raise UsageError(f"{run_dir} already holds a sweep; choose another run.dir.")
            run_dir.mkdir(parents=True, exist_ok=True)
            self._metrics = jsonl.Lines(run_dir / METRICS, sizes.get(METRICS))
            self._events = (
                None if events == "none" else jsonl.Lines(run_dir / EVENTS, sizes.get(EVENTS))
            )
            if sizes:
                (run_dir / SUMMARY).unlink(missing_ok=True)

    def sizes(self) -> dict[str, int]:
        """Return the bytes written so far, by file."""
        return {METRICS: self._metrics.size} | ({EVENTS: self._events.size} if self._events else {})

    def event(self, record: dict) -> None:
        """Record one round (`kind` = "round") or another event ("stage", "replan", ...) of one
        rank.
        """
        if self._events is not None:
            with writing(self.run_dir):
                self._events.append(record)

    def metric(self, record: dict) -> None:
        """Record an evaluation: `time_s`, `host_s`, `step` and so on, and metrics with names
        like `test/acc`.
        """
        with writing(self.run_dir):
            self._metrics.append(record)

    def document(self, name: str, text: str) -> None:
        """Write a further file of the run folder, as a whole or not at all."""
        with writing(self.run_dir):
            jsonl.write_bytes(self.run_dir / name, text.encode())

    def leave(self) -> None:
        """Close the files if nothing was run."""
        for lines in filter(None, (self._metrics, self._events)):
            lines.close()

    def close(self, summary: dict) -> None:
        """Write the trace and then the summary: once `summary.json` exists, all other files are
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
        finally:  # the summary is written even if the trace fails
            with writing(self.run_dir):
                jsonl.write_json(self.run_dir / SUMMARY, summary)


@contextmanager
def writing(run_dir: Path, begins: bool = False) -> Generator[None, None, None]:
    """Convert errors of the operating system to a sentence with the run folder and the fix.

    Args: begins, True before the run: a folder that cannot be written is then a usage error.
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
        found = unwritable_path_error(f"{UNWRITABLE} {run_dir}", error, "choose another run.dir.")
        raise (found if begins else AshlError(str(found))) from error
