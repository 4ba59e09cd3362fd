"""`ashl export`: write the records of finished runs, or a training script, for other tools."""

import shlex
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ashl.errors import UsageError

from .answer import Answer, Json
from .compare import Folders, show_left_out
from .train import Debug

FORMATS = ("csv", "parquet", "json")
TABLES = ("summary", "metrics", "events")
TARGETS = ("ddp", "torchft", "script")


def export(
    folders: Folders,
    kind: Annotated[
        str | None,
        typer.Option(
            "--format", metavar="|".join(FORMATS), help="Default: by the file's name, else csv."
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="|".join(TARGETS),
            help="Write a script that trains as the run did, with another tool.",
        ),
    ] = None,
    what: Annotated[
        str, typer.Option(metavar="|".join(TABLES), help="A row for each run, evaluation or event.")
    ] = "summary",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Default: standard output.")
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> Answer:
    """Write the records of runs as one flat table, for pandas.read_csv("runs.csv").

    With --to, write a script that trains the model of one run in the same synchronous rounds, with
    torch's DistributedDataParallel, torchft, or plain torch.
    """
    if to is not None:
        return export_to(to, folders, kind, out)
    named = out.suffix.lstrip(".") if out else ""
    if kind is None and named in ("md", "tex"):
        raise UsageError(
            f"--out {out}: records are {', '.join(FORMATS)}; for the leaderboard type ashl compare"
            f" with --out {out.name if out else ''}, or name a --format."
        )
    kind = kind or (named if named in FORMATS else "csv")
    for option, value, allowed in (("--format", kind, FORMATS), ("--what", what, TABLES)):
        if value not in allowed:
            raise UsageError(f"{option} {value}: unknown value; take {' or '.join(allowed)}")
    if kind == "parquet" and out is None:
        raise UsageError(
            "Parquet is no text for the terminal; name a file, as in --out runs.parquet."
        )
    from ashl.report import export as exports
    from ashl.report.compare import write_file
    from ashl.report.records import read_study

    study = read_study(folders)
    records, bad = exports.records_table(study, what)
    show_left_out((*study.left_out, *bad))
    if out is None:  # nothing follows the records on standard output
        show = partial(print, exports.as_file(records, kind), end="")
        return Answer({"what": what, "rows": exports.plain_rows(records)}, show)
    write_file(out, exports.as_file(records, kind))
    reading = f"print(pandas.read_{kind}({str(out)!r}))"
    following = shlex.join(["python", "-c", f"import pandas; {reading}"])
    return Answer(
        {"what": what, "out": str(out), "rows": exports.plain_rows(records)}, next=following
    )


def export_to(to: str, folders: Folders, kind: str | None, out: Path | None) -> Answer:
    """Write the script of one run for another tool, and return the answer."""
    if to not in TARGETS:
        raise UsageError(f"--to {to}: what exists is {', '.join(TARGETS)}.")
    if kind is not None:
        raise UsageError("--format is for records, and --to for a script; give one of them.")
    if len(folders) > 1:
        raise UsageError(
            f"--to {to} is of one run, and {len(folders)} folders are named; name one."
        )
    from ashl.export.scripts import render_script
    from ashl.report.compare import write_file

    if out is not None and out.stem == to == "torchft":
        raise UsageError(
            f"--out {out}: a script of that name hides torchft from itself; take another one, as"
            " train_torchft.py."
        )
    written = render_script(folders[0], to, out.name if out else f"train_{to}.py")
    if out is None:
        return Answer({"to": to, "script": written}, lambda: print(written, end=""))
    write_file(out, written)
    start = written.splitlines()[2].strip().replace(out.name, str(out))  # the head says how
    return Answer({"to": to, "script": written, "out": str(out)}, next=start)
