"""Where a job runs: the hosts of a hostfile, the ranks on their slots, what each finds in its environment."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ashl.errors import UsageError
from ashl.run.interface import is_loopback

LINE = re.compile(
    r"(?P<login>(?:[\w.][\w.-]*@)?[\w.][\w.-]*|[0-9a-fA-F:]*:[0-9a-fA-F:]*:[0-9a-fA-F:.]*)(?:\s+slots=(?P<slots>\d{1,4}))?"
)
COPIED = ("ASHL_", "NCCL_", "GLOO_", "OMP_")  # what the environment of every rank takes over from the launcher's


class Host(NamedTuple):
    """A line of a hostfile."""

    login: str  # as ssh takes it: a name, an address or an alias of its configuration, perhaps with `user@`
    slots: int  # how many ranks it takes

    @property
    def name(self) -> str:
        return self.login.rpartition("@")[2]


class HostRanks(NamedTuple):
    """The ranks of a job that run on one host: consecutive, LOCAL_RANK by slot."""

    host: Host
    ranks: range


def read_hosts(path: Path) -> tuple[Host, ...]:
    """The hosts of a file with a line for each: `host`, `user@host` or `host slots=2`; `#` begins a comment.

    Raises UsageError with the number of the line that is none of these, or that names a host again."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"--hosts {path} cannot be read: {why}.") from error
    found: dict[str, tuple[int, Host]] = {}
    for number, line in enumerate(lines, 1):
        if not (text := line.partition("#")[0].strip()):
            continue
        match = LINE.fullmatch(text)
        if match is None or (match["slots"] is not None and not int(match["slots"])):
            raise UsageError(f"{path}, line {number}: {text[:60]!r} is no host; write `host`, or `host slots=2`.")
        host = Host(match["login"], int(match["slots"] or 1))
        if host.name in found:
            first = found[host.name][0]
            raise UsageError(
                f"{path}, line {number}: {host.name} is there in line {first} already; give it slots=2, say, to run "
                "several ranks on it."
            )
        found[host.name] = number, host
    if not found:
        raise UsageError(f"{path} names no host; write one in each line, as in `node1 slots=2`.")
    return tuple(host for _, host in found.values())


def assign_slots(hosts: Sequence[Host], size: int) -> tuple[HostRanks, ...]:
    """Ranks 0 to size - 1 on the slots in their order; hosts that get none are left out."""
    shares, first = [], 0
    for host in hosts:
        if count := min(host.slots, size - first):
            shares.append(HostRanks(host, range(first, first + count)))
        first += count
    return tuple(shares)


def describe_idle_slots(hosts: Sequence[Host], size: int) -> str:
    """What there is to do for nobody, as in `node2 (1 of 2 slots), node3`; "" where all slots are taken."""
    taken = {share.host: len(share.ranks) for share in assign_slots(hosts, size)}
    left = {host: host.slots - taken.get(host, 0) for host in hosts}
    return ", ".join(
        host.name if host not in taken else f"{host.name} ({count} of {host.slots} slots)"
        for host, count in left.items()
        if count
    )


def ranks_environment(share: HostRanks, group: int, size: int, master: tuple[str, int]) -> dict[int, dict[str, str]]:
    """What torchrun would set for each rank of this host, the `group`-th."""
    common = {
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": len(share.ranks),
        "GROUP_RANK": group,
        "MASTER_ADDR": master[0],
        "MASTER_PORT": master[1],
    }
    own = {rank: common | {"RANK": rank, "LOCAL_RANK": local} for local, rank in enumerate(share.ranks)}
    return {rank: {name: str(value) for name, value in env.items()} for rank, env in own.items()}


def copied_environment(env: Mapping[str, str], wanted: Iterable[str]) -> dict[str, str]:
    """What every rank takes over from here: all that is for us, NCCL, gloo or OpenMP, and what the user names, as NAME
    or as NAME=VALUE. Raises UsageError for a name that is not set."""
    found = {name: value for name, value in env.items() if name.startswith(COPIED)}
    for text in wanted:
        name, equals, value = text.partition("=")
        if not name or (not equals and name not in env):
            raise UsageError(f"--env {text}: it is not set here; give it a value, as in --env {name or 'NAME'}=1.")
        found[name] = value if equals else env[name]
    return found


def master_address(first: Host, reached_at: str | None, seen_from: Sequence[str | None]) -> str:
    """The address of the first host as the others reach it.

    That is the one at which we have reached it, or its name where nothing tells. Where this is loopback, the launcher
    runs there itself, and the others know by which address it has come to them (`seen_from`)."""
    own = reached_at or first.name
    if not is_loopback(own):
        return own
    return next((address for address in seen_from if address and not is_loopback(address)), "127.0.0.1")
