"""How often a quota of processor time has held this process back, as Linux counts that for control groups.

Source: the manual page cgroups(7) and the kernel's "CPU Controller" (`cpu.stat`), both versions of groups; what a quota
does to those who are held back, `ashl.cluster.cores`.
"""

from pathlib import Path

OWN, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def throttled(own: Path = OWN, root: Path = ROOT) -> int | None:
    """Of its group and those that this one lies in; None where the system does not say."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return None
    counts = []
    for _, kinds, path in lines:
        if kinds and "cpu" not in kinds.split(","):
            continue
        group = root / kinds / path.strip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root / kinds):
                break
            try:
                counters = dict(line.split() for line in (folder / "cpu.stat").read_text().splitlines())
            except (OSError, ValueError):
                continue
            counts.append(int(counters.get("nr_throttled", 0)))  # where it is missing, no quota can be set
    return sum(counts) if counts else None
