"""Make tables of records for other tools: a row for each run, evaluation or event."""

import csv
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from ashl.errors import AshlError, UsageError
from ashl.report.records import BrokenRecordError, LeftOut, Run, Study, leaves, written
from ashl.report.settings import settings_of
from ashl.tracking import jsonl

PLACES = ("run.dir", "name", "seed", "sweep")  # typed keys whose values are in other columns
Record = dict[str, Any]
# Yields the records of one run at a time, so that only one run is in memory; can be called again.
Batches = Callable[[], Iterator[list[Record]]]


def summaries(study: Study) -> Batches:
    """Return one flat record for each run.

    Its columns: hash, the axes, other typed keys, the values of the summary, and each worker's
    values as `w0_wait_s`.
    """

    def rows() -> Iterator[list[Record]]:
        typed = [
            key
            for key in dict.fromkeys(key for run in study.runs for key in run.typed)
            if key not in PLACES
        ]
        for run, keys in _keyed(study):
            yield [
                _joined(
                    run,
                    keys | {key: _value(run, key) for key in typed if key not in keys},
                    _summary(run),
                )
            ]

    return rows


def metrics(study: Study) -> Batches:
    """Return a record for each evaluation."""
    return lambda: (
        [_joined(run, keys, _plain(row)) for row in run.metrics] for run, keys in _keyed(study)
    )


def events(study: Study) -> Batches:
    """Return a record for each event; a round's spans stay together, as JSON text."""
    return lambda: (
        [_joined(run, keys, _plain(row)) for row in read_events(run)] for run, keys in _keyed(study)
    )


TABLES = {"summary": summaries, "metrics": metrics, "events": events}


def table(study: Study, what: str) -> tuple[Batches, list[LeftOut]]:
    """Return the records of one kind, and the runs whose file is missing or broken.

    Raises: UsageError if no run has such records.
    """
    good, bad = [], []
    for run in study.runs:
        try:
            if what == "metrics":
                _ = run.metrics
            elif what == "events":
                for _ in read_events(run):
                    pass
            good.append(run)
        except BrokenRecordError as error:
            bad.append(LeftOut(str(run.folder), str(error)))
    if not good:
        raise UsageError(
            f"None of these runs has {what} to export; the first: {bad[0].name}: {bad[0].reason}."
        )
    kept = replace(study, runs=tuple(good))
    return TABLES[what](kept), bad


def read_events(run: Run) -> Iterator[Mapping[str, Any]]:
    """Yield every event of a run. Raises BrokenRecordError."""
    try:
        yield from jsonl.read(run.folder / "events.jsonl")
    except (OSError, ValueError) as error:
        raise BrokenRecordError("events.jsonl is missing or broken") from error


def _keyed(study: Study) -> Iterator[tuple[Run, Record]]:
    """Yield each run with its key columns: hash, setting, seed and the axes of the whole study."""
    axes, settings = settings_of(study)
    labels = {run: setting for setting in settings for run in setting.runs}
    for run in study.runs:
        setting = labels[run]
        values = {key: setting.axes.get(key, _value(run, key)) for key in axes}
        yield run, {"hash": run.hash, "setting": setting.label, "seed": run.seed} | values


def _value(run: Run, key: str) -> str | None:
    """Return the value of a key as typed, else its default; None if the run has no such key."""
    return run.typed.get(key, written(run.config[key]) if key in run.config else None)


def _joined(run: Run, keys: Record, recorded: Mapping[str, Any]) -> Record:
    """Join key columns and recorded values to one row.

    A recorded value never replaces a configured one: it gets the prefix `recorded_` if both differ.
    A null that has the name of a key becomes the key's value.
    """
    row = dict(keys)
    for key, value in recorded.items():
        if value is None and key in run.config:
            row.setdefault(key, _value(run, key))
        elif key not in keys:
            row[key] = value
        elif str(value) != str(keys[key]):
            row[f"recorded_{key}"] = value
    return row


def _summary(run: Run) -> Record:
    nested = ("workers", "stages")
    row = {"folder": str(run.folder)} | _plain(
        dict(leaves({k: v for k, v in run.summary.items() if k not in nested}))
    )
    for rank, worker in enumerate(run.summary.get("workers") or ()):
        row |= {f"w{rank}_{key}": value for key, value in worker.items() if key != "rank"}
    return {key.replace(".", "_"): value for key, value in row.items()}


def _plain(row: Mapping[str, Any]) -> Record:
    return {
        key: json.dumps(value) if isinstance(value, list | dict) else value
        for key, value in row.items()
    }


def columns_of(batches: Batches) -> dict[str, type]:
    """Return every column, in order of appearance, with the one type that holds all its values."""
    found: dict[str, type] = {}
    for batch in batches():
        for row in batch:
            for key, value in row.items():
                kind = type(value) if value is not None else type(None)
                known = found.setdefault(key, kind)
                if kind is not known and value is not None:
                    found[key] = (
                        kind
                        if known is type(None)
                        else float
                        if {kind, known} == {int, float}
                        else str
                    )
    return found


def write(batches: Batches, kind: str, out: Path | TextIO) -> None:
    """Write the records to a file, as a whole or not at all, or as text to a stream.

    Raises: AshlError if the file cannot be written.
    """
    writer = {"csv": write_csv, "json": write_json}.get(kind)
    if not isinstance(out, Path):
        assert writer, "Parquet is no text"
        writer(batches, out)
        return
    part = out.parent / f"{out.name}.part"
    try:
        if writer is None:
            write_parquet(batches, part)
        else:
            with open(part, "w", encoding="utf-8", newline="") as file:
                writer(batches, file)
        os.replace(part, out)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise AshlError(
            f"{out} cannot be written ({reason}); name another place with --out FILE."
        ) from error
    finally:
        part.unlink(missing_ok=True)


def write_csv(batches: Batches, file: TextIO) -> None:
    """Write comma-separated values with a header line; a missing value is empty."""
    writer = csv.DictWriter(file, columns_of(batches), lineterminator="\n")
    writer.writeheader()
    for batch in batches():
        writer.writerows(batch)


def write_json(batches: Batches, file: TextIO) -> None:
    """Write one JSON array of records, one record per line."""
    separator = "[\n"
    for batch in batches():
        for row in batch:
            file.write(separator + jsonl.dumps(row))
            separator = ",\n"
    file.write("\n]\n" if separator.startswith(",") else "[]\n")


def write_parquet(batches: Batches, path: Path) -> None:
    """Write Parquet, one row group per run."""
    import pyarrow
    from pyarrow import parquet

    types = {
        str: pyarrow.string(),
        int: pyarrow.int64(),
        float: pyarrow.float64(),
        bool: pyarrow.bool_(),
    }
    columns = columns_of(batches)
    schema = pyarrow.schema(
        [(name, types.get(kind, pyarrow.null())) for name, kind in columns.items()]
    )
    with parquet.ParquetWriter(path, schema) as writer:
        for batch in batches():
            arrays = [
                _array([row.get(name) for row in batch], kind) for name, kind in columns.items()
            ]
            made = [
                pyarrow.array(values, field.type)
                for values, field in zip(arrays, schema, strict=True)
            ]
            writer.write_table(pyarrow.Table.from_arrays(made, schema=schema))


def _array(values: Sequence[Any], kind: type) -> list[Any]:
    """Convert the values of one column to its type."""
    return [
        None if value is None else kind(value) if kind in (str, float) else value
        for value in values
    ]
