"""Read folders, rank their runs and write the report, for `ashl compare` and the end of `ashl
sweep`.
"""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ashl.errors import AshlError
from ashl.report import pdf
from ashl.report.leaderboard import Leaderboard, rank
from ashl.report.page import Figure, Said, booktabs, figures, leaderboard, page
from ashl.report.records import Study, read

REPORT = "report.html"


@dataclass(frozen=True)
class Comparison:
    """A comparison: what was read, the leaderboard, the figures, and the path of the report.

    `lacks` is a sentence on figures that could not be written; "" if there is none.
    """

    study: Study
    board: Leaderboard
    figures: list[Figure]
    report: Path
    lacks: str = ""

    @property
    def places(self) -> str:
        """Return the lines that name the report's path and the figures that are missing."""
        return f"report  {self.report}" + (f"\nfigures {self.lacks}" if self.lacks else "")


def compare(
    paths: Sequence[Path],
    *,
    out: Path | None = None,
    target: float | None = None,
    hold: int | None = None,
    baseline: str | None = None,
    command: str = "",
    own_target: bool = True,
    beside: str = "",
) -> Comparison:
    """Read the folders, rank their runs, and write the report.

    The report goes to `out`, or into the sweep's folder, together with `leaderboard.md`,
    `leaderboard.tex` and the figures as SVG and PDF.

    Args: own_target=False ignores the target of the runs themselves; beside is a word for the file
    names, so that the files of another target do not replace the sweep's own.
    Raises: UsageError for folders without a run, runs with different targets, and an unknown
    baseline; AshlError if the report cannot be written.
    """
    study = read(paths)
    board = rank(study, target=target, hold=hold, baseline=baseline, own_target=own_target)
    report = out or marked((study.folder or Path()) / REPORT, beside)
    drawn = figures(board)
    write(report, page(study, board, drawn, command, report.parent))
    lacks = ""
    if study.folder and out is None:
        write(marked(study.folder / "leaderboard.md", beside), leaderboard(board))
        write(marked(study.folder / "leaderboard.tex", beside), booktabs(board))
        lacks = _save(drawn, marked(study.folder / "figures", beside))
    return Comparison(study, board, drawn, report, lacks)


def marked(file: Path, word: str) -> Path:
    """Return a file's path with a word appended to its name.

    >>> marked(Path("report.html"), "target-0.9").name, marked(Path("figures"), "").name
    ('report-target-0.9.html', 'figures')
    """
    return file.with_name(f"{file.stem}-{word}{file.suffix}") if word else file


def rewrite(found: Comparison, folder: Path, command: str, said: Said) -> None:
    """Write the report again into a folder, with a command's own answer, lines and tables.

    Raises: AshlError if it cannot be written.
    """
    write(folder / REPORT, page(found.study, found.board, found.figures, command, folder, said))
    write(folder / "leaderboard.md", leaderboard(found.board, said.answer))


def _save(drawn: Sequence[Figure], folder: Path) -> str:
    """Write each figure as SVG and, if the library is installed, as PDF.

    Returns: a sentence on how to install the library; "" if it is installed.
    """
    folder.mkdir(exist_ok=True)
    lacks = pdf.lacks() if drawn else ""
    for figure in drawn:
        file = folder / "-".join(re.findall("[a-z]+", figure.title.lower()))
        write(file.with_suffix(".svg"), figure.svg)
        if not lacks:
            write(file.with_suffix(".pdf"), pdf.made_of(figure.svg))
    return lacks


def write(file: Path, content: str | bytes) -> None:
    """Write a file as a whole or not at all. Raises AshlError."""
    part = file.parent / f"{file.name}.part"
    try:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(part, file)
    except OSError as error:
        with suppress(OSError):  # a read-only file system raises here, too
            part.unlink(missing_ok=True)
        reason = (error.strerror or str(error)).lower()
        raise AshlError(
            f"{file} cannot be written ({reason}); name another place with --out FILE."
        ) from error
