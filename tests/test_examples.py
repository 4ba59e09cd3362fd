"""Every example runs as it stands in an empty folder, and prints what its head announces."""

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SCRIPTS = sorted([*EXAMPLES.glob("*.sh"), *EXAMPLES.glob("*.py")])
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
SHORT = ("06_own_model", "08_slurm")  # seconds; all others run with -m slow
LONGEST = "12_a_papers_table"  # many minutes: only its command is checked, as a dry run
MOST_LINES = 40


def expected(script: Path) -> list[str]:
    """The lines that the head of a script announces."""
    lines = script.read_text(encoding="utf-8").splitlines()
    start = next(k for k, line in enumerate(lines) if "Expected output" in line)
    head = [line.removeprefix("#") for line in lines[start + 1 :]]
    return [
        line.strip()
        for line in re.findall(
            r"^ {3,}(.+)$", "\n".join(head).split("\n\n")[0].split('"""')[0], re.M
        )
    ]


def run(command: list[str], folder: Path) -> str:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": path, "COLUMNS": "160"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_there_are_twelve_with_a_head() -> None:
    assert [script.name[:2] for script in SCRIPTS] == [f"{k:02}" for k in range(1, 13)]
    for script in SCRIPTS:
        text = script.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= MOST_LINES, script.name
        assert re.search(r"Minutes: \d+\. Expected output", text), script.name
        assert expected(script), script.name
    for notebook in NOTEBOOKS:
        assert nbformat.validate(nbformat.read(notebook, as_version=4)) is None
    assert len(NOTEBOOKS) == 2


def runs_as_announced(script: Path, folder: Path) -> None:
    interpreter = ["sh", "-eu"] if script.suffix == ".sh" else [sys.executable]
    if script.stem == "07_ddp_hook":
        interpreter = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    out = run([*interpreter, str(script)], folder)
    assert [line for line in expected(script) if line not in out] == [], out


@pytest.mark.parametrize("script", [s for s in SCRIPTS if s.stem in SHORT], ids=lambda s: s.stem)
def test_a_short_example_runs(script: Path, tmp_path: Path) -> None:
    runs_as_announced(script, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "script", [s for s in SCRIPTS if s.stem not in (*SHORT, LONGEST)], ids=lambda s: s.stem
)
def test_a_long_example_runs(script: Path, tmp_path: Path) -> None:
    runs_as_announced(script, tmp_path)


@pytest.mark.slow
def test_the_papers_table_can_be_planned(tmp_path: Path) -> None:
    text = (EXAMPLES / f"{LONGEST}.sh").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith("ashl sweep"))
    assert "predicted total" in run(["sh", "-c", f"{line} --dry-run"], tmp_path)


@pytest.mark.parametrize(
    "notebook",
    [
        pytest.param(file, marks=pytest.mark.slow if "pandas" in file.stem else ())
        for file in NOTEBOOKS
    ],
    ids=lambda notebook: notebook.stem,
)
def test_a_notebook_runs(notebook: Path, tmp_path: Path) -> None:
    cells = nbformat.read(notebook, as_version=4)
    NotebookClient(cells, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert all(cell.outputs for cell in cells.cells[-1:])
