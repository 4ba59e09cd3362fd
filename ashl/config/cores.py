"""The cores of this machine."""

import os


def usable_cores() -> int:
    """Return the number of cores that this process may use; on other systems than Linux, of all
    cores.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
