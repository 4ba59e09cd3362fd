"""What holds for all tests: one thread, no leftovers of the user's environment, no deadlines on a busy machine."""

import os

import hypothesis
import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: bitwise repeatable, and fair to the tests beside
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
for name in ("ASHL_DATA", "MLFLOW_TRACKING_URI", "GLOO_SOCKET_IFNAME", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
    os.environ.pop(name, None)

hypothesis.settings.register_profile("ashl", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ashl")


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """An empty current folder: `runs/` and `./data` are looked for there."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
