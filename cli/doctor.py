"""`ashl doctor`: check the installation and this machine."""

import os
import platform
import re
import socket
import sqlite3
from collections.abc import Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ashl import __version__
from ashl.config.cores import usable_cores
from ashl.config.override import command_text

from .answer import Answer, Json
from .table import show_rows
from .train import Debug

PACKAGES = (
    "torch",
    "torchvision",
    "numpy",
    "hydra-core",
    "omegaconf",
    "pydantic",
    "typer",
    "rich",
    "mlflow",
)
FAIL, MISSING = "FAIL", "MISSING"
REPAIR = "something above is broken or missing; install ashl into a new environment to repair it"
Row = tuple[str, str]


def doctor(json: Json = False, debug: Debug = False) -> Answer:
    """Show versions, backends, network interfaces, data and store.

    The exit code is 1 if something is broken.
    """
    rows: list[Row] = []
    for check in (_versions, _torch, _network, _data, _store):
        try:
            rows.extend(check())
        except Exception as error:  # a broken installation is what this command is for
            rows.append(
                (
                    check.__name__.strip("_"),
                    f"{FAIL}: {type(error).__name__}: {' '.join(str(error).split())}",
                )
            )
    broken = [name for name, text in rows if text.startswith((FAIL, MISSING))]
    return Answer(
        {"checks": dict(rows), "broken": broken},
        partial(show_rows, "", rows),
        next="" if broken else command_text("train", "runtime=sim"),
        error=REPAIR if broken else "",
    )


def _versions() -> Iterator[Row]:
    yield "ashl", f"{__version__} in {Path(__file__).resolve().parent.parent}"
    yield "python", f"{platform.python_version()} on {platform.platform(terse=True)}"
    for name in PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, MISSING
    yield "cores", f"{usable_cores()} of {os.cpu_count()} may be used"


def _torch() -> Iterator[Row]:
    import torch
    from torch import distributed

    from ashl.data.vision import load_torchvision

    yield "gloo", "on" if distributed.is_available() and distributed.is_gloo_available() else "off"
    yield "nccl", "on" if distributed.is_available() and distributed.is_nccl_available() else "off"
    names = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if torch.cuda.is_available()
        else []
    )
    yield (
        "cuda",
        ", ".join(names) or ("no device" if torch.version.cuda else "off, a CPU build of torch"),
    )
    load_torchvision()


def _network() -> Iterator[Row]:
    yield "interfaces", ", ".join(name for _, name in socket.if_nameindex())
    yield "GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME", "not set")
    host = socket.gethostname()
    try:
        yield "host name", f"{host} is {socket.gethostbyname(host)}"
    except OSError:
        yield "host name", f"{host} has no address; set GLOO_SOCKET_IFNAME for several nodes"


def _data() -> Iterator[Row]:
    from ashl.data.images import KNOWN

    root = Path(os.environ.get("ASHL_DATA") or "data").absolute()
    found = [
        name for name, known in KNOWN.items() if (root / known.files.partition("{")[0]).is_dir()
    ]
    yield (
        "data root",
        f"{root} {'' if root.is_dir() else 'is missing; digits and the synthetic sets need none'}",
    )
    yield "data sets there", ", ".join(found) or "none"


def _store() -> Iterator[Row]:
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if uri:
        yield "mlflow store", re.sub(r"//[^/@\s]+@", "//", uri)  # without name and password
        return
    file = Path("runs/mlflow.db").absolute()
    yield "mlflow store", f"{file} {_runs(file) if file.is_file() else 'is made by the first run'}"


def _runs(file: Path) -> str:
    with sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True, timeout=2.0) as database:
        count = database.execute("SELECT count(*) FROM runs").fetchone()[0]
    return f"holds {count} run{'' if count == 1 else 's'}"
