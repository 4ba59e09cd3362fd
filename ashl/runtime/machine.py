"""Identify the machine that this process runs on; a host name is not always unique."""

import os
import platform
from pathlib import Path

BOOT = Path("/proc/sys/kernel/random/boot_id")  # random, new at each boot of the machine


def boot() -> str:
    """Return an identifier that processes share if they share a monotonic clock."""
    try:
        return BOOT.read_text(encoding="utf-8").strip()
    except OSError:
        return platform.node()


def machine() -> str:
    """Return an identifier that processes share if they share a loopback interface; containers of
    one machine do not.
    """
    try:
        network = str(os.stat("/proc/self/ns/net").st_ino)
    except OSError:
        network = ""
    return f"{boot()}/{network}"
