"""The printed link in a real browser: a sweep's runs beside each other, with their charts."""

import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ashl.cli.app import main

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
GRID = ["sync=bsp,asp", "seed=0,1", "runtime=sim", "model.hidden=[4]", "stop.epochs=2"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_the_page_of_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert main(["sweep", *GRID]) == 0
    asked = re.search(r"^MLflow  ashl ui (\S+)$", capsys.readouterr().out, re.M)
    assert asked
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "ashl.cli", "ui", asked[1], "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout
            seen = dom(server.stdout.readline().strip())
        finally:
            server.terminate()
    for text in ("sync=bsp seed=0", "sync=asp seed=1", "test/acc", "perf/wait_share"):
        assert text in seen
    settings = json.loads((next(tmp_path.glob("runs/sweeps/*")) / "sweep.json").read_text())[
        "settings"
    ]
    assert len(settings) == 4


def dom(page: str) -> str:
    """The page's text once its scripts have had a minute."""
    assert CHROMIUM
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1600,12000",
        "--virtual-time-budget=60000",
    ]
    done = subprocess.run(
        [CHROMIUM, *options, "--dump-dom", page], capture_output=True, text=True, timeout=300
    )
    return re.sub(r"<[^>]+>", " ", done.stdout)
