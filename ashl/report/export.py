"""Make tables of records for other tools: a row for each run, evaluation or event."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ashl.config.flat import flat_items, setting_text
from ashl.errors import UsageError
from ashl.report.records import BrokenRecordError, LeftOut, Run, Study
from ashl.report.settings import settings_of
from ashl.tracking import jsonl

if TYPE_CHECKING:
    from pandas import DataFrame, Series

PLACES = ("run.dir", "name", "seed", "sweep")  # typed keys whose values are in other columns
Record = dict[str, Any]


def records_table(study: Study, what: str) -> tuple["DataFrame", list[LeftOut]]:
    """Return a row for each run (`summary`), evaluation (`metrics`) or event (`events`).

    The first columns are hash, setting, seed and the axes of the whole study. A row of a run also
    has the other typed keys, the values of the summary, and each worker's as `w0_wait_s`. Lists are
    JSON text.

    Returns: the table, and the runs whose file is missing or broken.
    Raises: UsageError if no run has such records.
    """
    from pandas import DataFrame, concat

    axes, settings = settings_of(study)
    labels = {run: setting for setting in settings for run in setting.runs}
    typed = dict.fromkeys(
        key for run in study.runs for key in run.typed_values if key not in PLACES
    )
    frames, bad = [], []
    for run in study.runs:
        own = labels[run].axes
        keys: Record = {"hash": run.hash, "setting": labels[run].label, "seed": run.seed}
        keys |= {key: own.get(key, _typed_or_default(run, key)) for key in axes}
        if what == "summary":
            keys |= {key: _typed_or_default(run, key) for key in typed if key not in keys}
        try:
            rows = [_join_columns(run, keys, row) for row in _read_records(run, what)]
            frames.append(DataFrame(rows, dtype=object))
        except BrokenRecordError as error:
            bad.append(LeftOut(str(run.folder), str(error)))
    if not frames:
        first = f"{Path(bad[0].name).name}: {bad[0].reason}"
        raise UsageError(f"None of these runs has {what} to export; the first: {first}.")
    return concat(frames, ignore_index=True), bad


def _read_records(run: Run, what: str) -> Iterator[Mapping[str, Any]]:
    """Yield the records of a run. Raises BrokenRecordError."""
    if what == "metrics":
        yield from run.metrics
    elif what == "summary":
        rest = {key: run.summary[key] for key in run.summary if key not in ("workers", "stages")}
        row = {"folder": str(run.folder), **dict(flat_items(rest))}
        for rank, worker in enumerate(run.summary.get("workers") or ()):
            row |= {f"w{rank}_{key}": value for key, value in worker.items() if key != "rank"}
        yield {key.replace(".", "_"): value for key, value in row.items()}
    else:
        try:
            yield from jsonl.read(run.folder / "events.jsonl")
        except (OSError, ValueError) as error:
            raise BrokenRecordError("events.jsonl is missing or broken") from error


def _typed_or_default(run: Run, key: str) -> str | None:
    """Return the value of a key as typed, else its default; None if the run has no such key."""
    return run.typed_values.get(key, setting_text(run.config[key]) if key in run.config else None)


def _join_columns(run: Run, keys: Record, recorded: Mapping[str, Any]) -> Record:
    """Join key columns and recorded values to one row.

    A recorded value never replaces a configured one: it gets the prefix `recorded_` if both differ.
    A null that has the name of a key becomes the key's value.
    """
    row = dict(keys)
    for key, value in recorded.items():
        value = json.dumps(value) if isinstance(value, list | dict) else value
        if value is None and key in run.config:
            row.setdefault(key, _typed_or_default(run, key))
        elif key not in keys:
            row[key] = value
        elif str(value) != str(keys[key]):
            row[f"recorded_{key}"] = value
    return row


def as_file(records: "DataFrame", kind: str) -> str | bytes:
    """Return records as the content of a file: csv, json or parquet.

    Each column has one type that holds all its values: whole numbers stay whole where some are
    missing, and mixed values become text.
    """
    typed = records.apply(_with_one_type)
    if kind == "parquet":
        return typed.to_parquet(index=False)
    if kind == "csv":
        return typed.to_csv(index=False, lineterminator="\n")
    return "[\n" + ",\n".join(map(jsonl.dumps, plain_rows(records))) + "\n]\n"


def plain_rows(records: "DataFrame") -> list[Record]:
    """Return each row as plain values, without missing ones, as in a JSON file."""
    return [row.dropna().to_dict() for _, row in records.apply(_with_one_type).iterrows()]


def _with_one_type(column: "Series") -> "Series":
    kinds = set(map(type, column.dropna()))
    for known, kind in (({bool}, "boolean"), ({int}, "Int64"), ({int, float}, "float64")):
        if kinds and kinds <= known:
            return column.astype(kind)
    return column.map(str, na_action="ignore").astype("string")
