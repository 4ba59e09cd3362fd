"""When and with what something was measured, and on how busy a machine."""

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version

from ashl import __version__


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    return {"ashl": __version__, "python": platform.python_version(), "torch": version("torch")}


def load() -> dict[str, float]:
    """Cores, and how many processes wanted one in the last minute, and in the last five."""
    one, five, _ = os.getloadavg()
    return {"cores": len(os.sched_getaffinity(0)), "load_1min": one, "load_5min": five}
