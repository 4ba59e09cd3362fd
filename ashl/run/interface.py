"""Which network interface a rank's messages go through, for gloo and NCCL alike.

gloo advertises the address of the interface that it is set to, and of itself what the machine's own
name resolves to: with the `127.0.1.1 name` of a Debian that is loopback, and no other machine
reaches it.
"""

import fcntl
import os
import socket
import struct
from array import array
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from ashl.errors import UsageError

KEY, GLOO, NCCL = "runtime.interface", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
LOOPBACK, LOCAL = "lo", "localhost"
SIOCGIFCONF = 0x8912  # all interfaces that have an IPv4 address
IFREQ = 40  # bytes of one in the answer: 16 of its name, 4 of family and port, 4 of the address
ANY_PORT = 9  # nothing is sent there
LOOPBACK_S = 5.0  # in which a connection within this machine is made


class Chosen(NamedTuple):
    """An interface with its address, and the key or variable that names it, if one does."""

    name: str
    address: str
    by: str | None = None

    @property
    def loopback(self) -> bool:
        return is_loopback(self.address)


def is_loopback(host: str) -> bool:
    """Of an address; of names only `localhost` is."""
    try:
        return ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == LOCAL


def addresses() -> dict[str, list[str]]:
    """The addresses of each interface of this machine, IPv4 first."""
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = array("B", bytes(1024 * IFREQ))
        asked = struct.pack("iL", len(answer), answer.buffer_info()[0])
        length = struct.unpack("iL", fcntl.ioctl(probe, SIOCGIFCONF, asked))[0]
    for start in range(0, length, IFREQ):
        label = bytes(answer[start : start + 16]).split(b"\0")[0].decode()
        own = socket.inet_ntop(socket.AF_INET, bytes(answer[start + 20 : start + 24]))
        found.setdefault(label.partition(":")[0], []).append(own)
    with suppress(OSError):  # a machine without IPv6
        for line in Path("/proc/net/if_inet6").read_text(encoding="utf-8").splitlines():
            digits, *_, name = line.split()
            found.setdefault(name, []).append(
                socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
            )
    return found


def check_loopback(by: str) -> None:
    """Raise UsageError unless processes on this machine reach each other over 127.0.0.1. `by`: what
    needs it.
    """
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            socket.create_connection(listener.getsockname(), timeout=LOOPBACK_S).close()
    except OSError as error:
        raise UsageError(
            f"{by}: processes on this machine do not reach each other over loopback, 127.0.0.1"
            f" ({error.strerror or error}); bring it up with `ip link set {LOOPBACK} up`, or take"
            " runtime=sim"
        ) from error


def named(wanted: str | None) -> Chosen | None:
    """What `runtime.interface` names, else GLOO_SOCKET_IFNAME; None where neither does. Raises
    UsageError where this machine has no such interface, or it has no address.
    """
    by, names = (KEY, wanted) if wanted is not None else (GLOO, os.environ.get(GLOO, ""))
    if wanted is None and not names:
        return None
    there = addresses()
    for name in names.split(","):
        if name not in there:
            raise UsageError(
                f"{by}={names}, and {socket.gethostname()} has no interface {name!r}; there are:"
                f" {', '.join(there)}"
            )
        if not there[name]:
            having = ", ".join(other for other, own in there.items() if own)
            raise UsageError(
                f"{by}={names}, and {name} has no address; those that have one are: {having}"
            )
    return Chosen(names, there[names.split(",")[0]][0], by)


def towards(host: str, port: int = ANY_PORT) -> Chosen | None:
    """The interface through which packets to that host leave; None where nothing leads there.
    Nothing is sent.
    """
    try:
        targets = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, target in targets:
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            own = probe.getsockname()[0].partition("%")[0]
            for name, there in addresses().items():
                if own in there:
                    return Chosen(name, own)
            if is_loopback(own):  # any of 127.0.0.0/8
                return Chosen(LOOPBACK, own)
    return None


def reaching(chosen: Chosen | None, elsewhere: Iterable[str | None]) -> Chosen | None:
    """The interface for a rank whose job has processes on other machines, which have these
    addresses: loopback leads to none of them.
    """
    if chosen is not None and (chosen.by or not chosen.loopback):
        return chosen
    for address in elsewhere:
        if (
            address
            and not is_loopback(address)
            and (found := towards(address))
            and not found.loopback
        ):
            return found
    return chosen


def use(chosen: Chosen | None) -> None:
    """Have gloo and NCCL take this interface in this process; None = what they take by
    themselves.
    """
    if chosen is None:
        return
    os.environ[GLOO] = chosen.name
    if chosen.by == KEY or NCCL not in os.environ:
        os.environ[NCCL] = (
            f"={chosen.name}"  # exactly this one, where NCCL would take any that begins like it
        )
