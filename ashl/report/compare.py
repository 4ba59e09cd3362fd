"""Compare runs and write the report, for `ashl compare` and the end of `ashl sweep`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from ashl.errors import UsageError, unwritable
from ashl.report.leaderboard import Leaderboard, rank
from ashl.report.records import Study, read
from ashl.tracking import jsonl

if TYPE_CHECKING:
    from ashl.report.answer import Said

REPORT = "report.html"
KINDS = ("svg", "pdf", "png")  # of figures' files


@dataclass(frozen=True)
class Comparison:
    """A comparison: what was read, and the leaderboard."""

    study: Study
    board: Leaderboard


def compare(
    paths: Sequence[Path],
    *,
    target: float | None = None,
    hold: int | None = None,
    baseline: str | None = None,
    own_target: bool = True,
) -> Comparison:
    """Read the folders and rank their runs.

    Args: own_target=False ignores the target of the runs themselves.
    Raises: UsageError for folders without a run, runs with different targets, and an unknown
    baseline.
    """
    study = read(paths)
    board = rank(study, target=target, hold=hold, baseline=baseline, own_target=own_target)
    return Comparison(study, board)


def write_report(
    found: Comparison,
    *,
    out: Path | None = None,
    folder: Path | None = None,
    command: str = "",
    beside: str = "",
    said: "Said | None" = None,
    kinds: Sequence[str] = (),
) -> Path:
    """Write the report to `out`, or into the folder of the sweep, or here.

    Without `out`, a sweep's folder also gets `leaderboard.md` and its figures.

    Args: folder stands for the sweep's folder; command is the typed command; beside is a word for
    the file names, so that the files of another target do not replace the sweep's own; said is a
    command's own answer; kinds are those of the figures' files, svg by default for a sweep.
    Raises: UsageError or AshlError if a file cannot be written.
    """
    from ashl.report.figures import figures
    from ashl.report.page import page
    from ashl.report.tables import markdown

    study, board, folder = found.study, found.board, folder or found.study.folder
    report = out or marked((folder or Path()) / REPORT, beside)
    drawn = figures(board)
    write(report, page(study, board, drawn, command, report.parent, said))
    if folder and out is None:
        answered = said.answer if said else None
        write(marked(folder / "leaderboard.md", beside), markdown(board, answered))
        kinds = kinds or ("svg",)
    place = marked(report.with_name("figures"), beside)
    for figure, kind in product(drawn, kinds):
        stem = "-".join(re.findall("[a-z]+", figure.title.lower()))
        write(place / f"{stem}.{kind}", figure.saved(kind), make_folder=True)
    return report


def check_kinds(kinds: Sequence[str]) -> None:
    """Raise UsageError for an unknown kind of figures' files."""
    unknown = next((kind for kind in kinds if kind not in KINDS), None)
    if unknown is not None:
        raise UsageError(f"--figures {unknown}: there are {', '.join(KINDS)}.")


def marked(file: Path, word: str) -> Path:
    """Return a file's path with a word appended to its name.

    >>> marked(Path("report.html"), "target-0.9").name, marked(Path("figures"), "").name
    ('report-target-0.9.html', 'figures')
    """
    return file.with_name(f"{file.stem}-{word}{file.suffix}") if word else file


def write(file: Path, content: str | bytes, make_folder: bool = False) -> None:
    """Write a file that the user asked for, as a whole or not at all.

    Raises: UsageError for a place that cannot be written, AshlError for a full disk.
    """
    try:
        if make_folder:
            file.parent.mkdir(exist_ok=True)
        jsonl.write_bytes(file, content.encode() if isinstance(content, str) else content)
    except OSError as error:
        fix = "name another place with --out FILE."
        raise unwritable(f"{file} cannot be written", error, fix) from error
