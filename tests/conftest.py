"""Set-up of all tests: one thread, no leftovers of the user's environment, no deadlines under load."""

import os
import signal
from pathlib import Path

import hypothesis
import pytest

# Before torch is imported: bitwise repeatable, and fair to the tests beside.
os.environ["OMP_NUM_THREADS"] = "1"
if (cpu := Path("/proc/cpuinfo")).is_file() and " avx2 " in cpu.read_text():
    os.environ.setdefault(
        "OPENBLAS_CORETYPE", "Haswell"
    )  # NumPy's products round identically, with wider vectors or without
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if (
        signal.getsignal(number) is signal.SIG_IGN
    ):  # as under nohup, or in the background of a script
        signal.signal(number, handler)
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
for name in (
    "ASHL_DATA",
    "MLFLOW_TRACKING_URI",
    "GLOO_SOCKET_IFNAME",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "COLUMNS",
):
    os.environ.pop(name, None)
os.environ.pop(
    "PYTHONDONTWRITEBYTECODE", None
)  # else each process that a test starts compiles all of ashl again

hypothesis.settings.register_profile("ashl", deadline=None, derandomize=True, max_examples=40)
hypothesis.settings.register_profile(
    "all", hypothesis.settings.get_profile("ashl"), max_examples=100
)

REWRITES = (
    "test_rewrite_golden",
    "test_rewrite_curves",
)  # what --rewrite-golden runs, and nothing else does


def pytest_addoption(parser):
    parser.addoption(
        "--rewrite-golden",
        action="store_true",
        help="record again the values that tests/golden compares with",
    )


def pytest_configure(config):
    """Laws are tried on more examples where slow tests run, too: with `-m ""`."""
    hypothesis.settings.load_profile("ashl" if "not slow" in config.option.markexpr else "all")


def pytest_collection_modifyitems(config, items):
    rewrite = config.getoption("--rewrite-golden")
    items[:] = [item for item in items if (item.name in REWRITES) == rewrite]


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """An empty current folder: `runs/` and `./data` are looked for there."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def _forecasts(monkeypatch):
    """Shorten the forecasts of plans. A file that compares with them has a fixture of this name."""
    monkeypatch.setattr("ashl.planning.predict.CYCLES", 8)
