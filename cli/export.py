"""`ashl export`: what finished runs recorded, and how they ran, for other tools."""

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from ashl.errors import AshlError, UsageError

from .compare import Folders, show_left_out
from .train import Debug

FORMATS, TABLES = ("csv", "parquet", "json"), ("summary", "metrics", "events")
TARGETS = ("ddp", "torchft", "deepspeed", "script")


def export(
    folders: Folders,
    kind: Annotated[
        str | None,
        typer.Option("--format", metavar="|".join(FORMATS), help="Default: by the file's name, else csv."),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to", metavar="|".join(TARGETS), help="No records: a script that does what the run did, without ashl."
        ),
    ] = None,
    what: Annotated[
        str, typer.Option(metavar="|".join(TABLES), help="A row for each run, evaluation or event.")
    ] = "summary",
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Default: standard output.")] = None,
    debug: Debug = False,
) -> int:
    """Write what runs recorded as one flat table, which pandas reads in one line: pandas.read_csv("runs.csv").

    With --to: a script that trains the same model with the combination of one run whose workers go round by round, with
    torch's DistributedDataParallel, torchft, DeepSpeed, or plain torch.
    """
    if to is not None:
        return export_to(to, folders, kind, out)
    named = out.suffix.lstrip(".") if out else ""
    kind = kind or (named if named in FORMATS else "csv")
    for option, value, allowed in (("--format", kind, FORMATS), ("--what", what, TABLES)):
        if value not in allowed:
            raise UsageError(f"{option} {value}: there are {', '.join(allowed)}.")
    if kind == "parquet" and out is None:
        raise UsageError("Parquet is no text for the terminal; name a file, as in --out runs.parquet.")
    from ashl.report import flat
    from ashl.report.records import read

    study = read(folders)
    batches, bad = flat.table(study, what)
    show_left_out((*study.left_out, *bad))
    flat.write(batches, kind, out or sys.stdout)
    return 0


def export_to(to: str, folders: Folders, kind: str | None, out: Path | None) -> int:
    """The script for another tool, of one run."""
    if to not in TARGETS:
        raise UsageError(f"--to {to}: what exists is {', '.join(TARGETS)}.")
    if kind is not None:
        raise UsageError("--format is for records, and --to for a script; give one of them.")
    if len(folders) > 1:
        raise UsageError(f"--to {to} is of one run, and {len(folders)} folders are named; name one.")
    from ashl.export import ddp, deepspeed, script, torchft

    scripts = {"ddp": ddp.script, "torchft": torchft.script, "deepspeed": deepspeed.script, "script": script.script}
    name = out.name if out else f"train_{to}.py"
    if out is not None and out.stem == to and to in ("torchft", "deepspeed"):
        raise UsageError(
            f"--out {out}: a script of that name hides {to} from itself; take another one, as train_{to}.py."
        )
    try:
        written = scripts[to](folders[0], name)
    except UsageError as error:
        raise UsageError(f"{str(error).rstrip('.')}{elsewhere(folders[0], scripts)}.") from error
    if out is None:
        print(written, end="")
        return 0
    try:
        out.write_text(written, encoding="utf-8")
    except OSError as error:
        raise AshlError(f"{out} cannot be written ({error.strerror}); name another place with --out FILE.") from error
    return 0


def elsewhere(run: Path, scripts: Mapping[str, Callable[[Path], str]]) -> str:
    """Which others have a script of this run, as the end of a sentence."""
    able = []
    for to, script in scripts.items():
        with suppress(AshlError):
            script(run)
            able.append(f"--to {to}")
    return f"; of this run there is {' and '.join(able)}" if able else ""
