"""The wheel has all files: it trains, sweeps and compares from an empty folder, without the checkout."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import ashl

ROOT = Path(__file__).resolve().parents[1]


def test_all_files_have_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == ashl.__version__
    citation = (ROOT / "CITATION.cff").read_text()
    version, day = (
        re.search(rf"^{key}: (\S+)$", citation, re.M)[1] for key in ("version", "date-released")
    )
    assert version == ashl.__version__
    assert f"## [{version}] - {day}\n" in (ROOT / "CHANGELOG.md").read_text()


def said(*command: object, folder: Path) -> str:
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env=clean, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_wheel_trains_from_an_empty_folder(tmp_path: Path) -> None:
    """Its dependencies are those of this environment, so that nothing is fetched."""
    source, dist, place = (tmp_path / name for name in ("source", "dist", "place"))
    for name in ("ashl", "cli", "conf", "pyproject.toml", "README.md", "LICENSE"):
        source.mkdir(exist_ok=True)
        subprocess.run(["cp", "-r", ROOT / name, source / name], check=True)
    place.mkdir()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", dist, source]
    said(*pip, *build, folder=place)
    (wheel,) = dist.glob("ashl-*.whl")
    said(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", folder=place)
    python = tmp_path / "venv/bin/python"
    said(*pip, "--python", python, "install", "--no-deps", wheel, folder=place)
    site = Path(
        said(python, "-c", "import site; print(site.getsitepackages()[0])", folder=place).strip()
    )
    others = [path for path in sys.path if path.endswith("site-packages")]  # torch and the rest
    (site / "others.pth").write_text("\n".join(others))
    where = said(python, "-c", "import ashl; print(ashl.__file__)", folder=place)
    assert Path(where.strip()).is_relative_to(tmp_path / "venv")
    command = tmp_path / "venv/bin/ashl"
    said(command, "train", "runtime=sim", "stop.steps=40", "run.dir=run", folder=place)
    said(
        command,
        "sweep",
        "sync=bsp,asp",
        "runtime=sim",
        "stop.steps=40",
        "run.dir=study",
        folder=place,
    )
    assert "next: " in said(command, "compare", "study", folder=place)
