"""From folders to a leaderboard and a report: what `ashl compare` does, and `ashl sweep` at its
end.
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
    """What was read, how it ranks, what was drawn of it, where the report lies, and what it lacks,
    in a sentence.
    """

    study: Study
    board: Leaderboard
    figures: list[Figure]
    report: Path
    lacks: str = ""

    @property
    def places(self) -> str:
        """Where the report lies, and what could lie beside it."""
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
    """Read the folders, rank what they hold, and write the report: to `out`, or into the sweep's
    folder, where `leaderboard.md` and the figures, as SVG and PDF, go, too. Without `own_target`,
    the target of the runs themselves is ignored. `beside` is a word for the names of these files,
    which then replace none of the sweep's own.

    Raises UsageError for folders that hold no run, runs of different targets and a baseline that is
    not there, and AshlError where the report cannot be written.
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
    """Return a file's path with a word behind its name.

    >>> marked(Path("report.html"), "target-0.9").name, marked(Path("figures"), "").name
    ('report-target-0.9.html', 'figures')
    """
    return file.with_name(f"{file.stem}-{word}{file.suffix}") if word else file


def rewrite(found: Comparison, folder: Path, command: str, said: Said) -> None:
    """Write the report again into a folder, with what a command says beside the leaderboard.

    Raises AshlError where it cannot be written.
    """
    write(folder / REPORT, page(found.study, found.board, found.figures, command, folder, said))
    write(folder / "leaderboard.md", leaderboard(found.board, said.answer))


def _save(drawn: Sequence[Figure], folder: Path) -> str:
    """Each figure as SVG and, where the library is there, as PDF; else a sentence that says how to
    have it.
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
    """The whole of a file or nothing of it. Raises AshlError, in one sentence."""
    part = file.parent / f"{file.name}.part"
    try:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(part, file)
    except OSError as error:
        with suppress(OSError):  # a read-only file system says so here, too
            part.unlink(missing_ok=True)
        reason = (error.strerror or str(error)).lower()
        raise AshlError(
            f"{file} cannot be written ({reason}); name another place with --out FILE."
        ) from error
