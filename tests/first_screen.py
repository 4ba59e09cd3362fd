"""The table of README.md's first screen: `python -m tests.first_screen` runs its command and writes
docs/results/data/first_screen.csv, which `python -m tests.pages` puts into the page.
"""

from __future__ import annotations

import csv
import io
import json
import shlex
from collections.abc import Mapping
from contextlib import chdir, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ashl.cli.app import main as ashl
from ashl.cli.demo import SCENES

FILE = Path(__file__).parents[1] / "docs" / "results" / "data" / "first_screen.csv"
SWEEP = shlex.split(SCENES[-1].command)[1:]
HEAD = (
    "method",
    "seconds to 95 %",
    "range of five seeds",
    "times as long",
    "95 % interval",
    "waiting",
)
WITHOUT_MLFLOW = "tracking=none"


def answer() -> dict[str, Any]:
    """The document that the command prints with `--json`."""
    printed = io.StringIO()
    with TemporaryDirectory() as folder, chdir(folder), redirect_stdout(printed):
        assert ashl([*SWEEP, WITHOUT_MLFLOW, "-q", "--json"]) == 0
    return json.loads(printed.getvalue())


def rows(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A row for each setting: seconds, and how many times as long as the first one takes."""
    found = [HEAD]
    for setting in document["settings"]:
        value, behind = setting["value"], setting["first_against_it"]
        wait = f"{setting['means']['wait_share']:.1%}".replace("%", " %")
        spread = f"{value['low']:.2f} to {value['high']:.2f}"
        ratio = "1" if behind is None else f"{behind['middle']:.2f}"
        interval = "" if behind is None else f"{behind['low']:.2f} to {behind['high']:.2f}"
        found.append((setting["setting"], f"{value['middle']:.2f}", spread, ratio, interval, wait))
    return found


def main() -> None:
    with FILE.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows(answer()))
    print(FILE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
