"""The pictures of README.md, made from real runs in virtual time: `python -m tests.pictures
[FOLDER]` (default: docs).

`live_table.svg` is the table that a terminal shows halfway through `TRAIN`. `report.png` is the top
of the report of `SWEEP`, drawn by Chromium; without Chromium that picture does not change.
"""

from __future__ import annotations

import io
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import chdir, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from PIL import Image
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI

from ashl.cli.app import main as ashl
from ashl.cli.demo import SCENES
from ashl.tracking.console import Frame, Progress

DOCS = Path(__file__).parents[1] / "docs"
TRAIN, SWEEP = (shlex.split(scene.command)[1:] for scene in SCENES[1:])  # the README's own
WITHOUT_MLFLOW = "tracking=none"
HALFWAY, WIDTH = 0.5, 72
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
PAGE = (1060, 940)  # pixels of the window that the report is drawn in
# of the picture, the most that a palette has: with 48 two settings had the same colour
COLOURS = 256
FONT_FACES = re.compile(
    r"\s*@font-face \{\{.*?\n    \}\}", re.S
)  # rich's, which a page would fetch from elsewhere


def live_table(file: Path) -> None:
    """The table of a run, as its terminal shows it when half of the run is done."""
    seen: list[tuple[Progress, Frame]] = []

    def update(progress: Progress, snapshot: Frame) -> None:
        seen.append((progress, snapshot))

    with (
        TemporaryDirectory() as folder,
        chdir(folder),
        redirect_stdout(io.StringIO()),
        patch.object(Progress, "due", lambda progress, host_s: True),
        patch.object(Progress, "update", update),
    ):
        ashl([*TRAIN, WITHOUT_MLFLOW])
    progress, snapshot = min(seen, key=lambda found: abs((found[1].progress or 0.0) - HALFWAY))
    console = Console(
        record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(progress._draw(snapshot))
    form = FONT_FACES.sub("", CONSOLE_SVG_FORMAT).replace(
        "Fira Code, monospace", "ui-monospace, Menlo, monospace"
    )
    text = console.export_svg(
        title=f"ashl {' '.join(TRAIN)}",
        theme=MONOKAI,
        code_format=form,
        unique_id="ashl",
        font_aspect_ratio=0.61,
    )
    file.write_text(re.sub(r"[ \t]+$", "", text, flags=re.M), encoding="utf-8")


def report(file: Path) -> None:
    """The top of the report of a sweep, as a browser draws it."""
    assert CHROMIUM
    with TemporaryDirectory() as folder, chdir(folder):
        with redirect_stdout(io.StringIO()):
            ashl([*SWEEP, WITHOUT_MLFLOW])
        page = next(Path(folder).glob("runs/sweeps/*/report.html"))
        quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        place = [
            "--hide-scrollbars",
            f"--user-data-dir={folder}/chromium",
            f"--window-size={PAGE[0]},{PAGE[1]}",
            "--screenshot=page.png",
        ]
        subprocess.run(
            [CHROMIUM, *quiet, *place, page.as_uri()], check=True, capture_output=True, timeout=120
        )
        drawn = Image.open("page.png").convert("RGB")
        # by octree: the median cut mixed the thin lines of two settings
        drawn.quantize(COLOURS, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(
            file, optimize=True
        )


def main(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    folder = folder.absolute()
    live_table(folder / "live_table.svg")
    if CHROMIUM:
        report(folder / "report.png")
    else:
        print("report.png was not drawn: there is no Chromium here")
    for file in sorted(folder.glob("*.[sp][vn]g")):
        print(f"{file.name} {file.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(Path(*sys.argv[1:2]) if sys.argv[1:] else DOCS)
