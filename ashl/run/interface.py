"""Choose the network interface of a rank's messages, for gloo and NCCL.

Chosen is `runtime.interface`, else GLOO_SOCKET_IFNAME, else the interface of the route to the
master. Without any, gloo advertises the address of the machine's own name. On Debian that is
loopback (`127.0.1.1 name` in /etc/hosts), which no other machine can reach.
"""

import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

import psutil

from ashl.errors import UsageError
from ashl.launch.environment import LOCAL, is_loopback

KEY = "runtime.interface"
GLOO = "GLOO_SOCKET_IFNAME"
NCCL = "NCCL_SOCKET_IFNAME"
LOOPBACK = "lo"
ANY_PORT = 9  # the discard port; no packet is sent
LOOPBACK_S = 5.0  # seconds to connect within this machine


class Interface(NamedTuple):
    """An interface, or several in one setting, with the address of the first."""

    name: str  # names are separated by commas
    address: str
    by: str | None = None  # the key or variable that sets it; None if the route does

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.address)


def addresses() -> dict[str, list[str]]:
    """Return the addresses of each interface of this machine, IPv4 first."""
    families = socket.AF_INET, socket.AF_INET6
    return {
        name: [
            own.address.partition("%")[0]
            for family in families
            for own in known
            if own.family == family
        ]
        for name, known in psutil.net_if_addrs().items()
    }


def check_loopback(by: str) -> None:
    """Raise UsageError unless processes on this machine reach each other over 127.0.0.1.

    Args: by, the setting that needs it, for the message.
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


def find_configured(wanted: str | None) -> Interface | None:
    """Find the interface of runtime.interface (`wanted`), else of GLOO_SOCKET_IFNAME; None
    without either.

    Raises: UsageError if this machine has no such interface, or it has no address.
    """
    by, names = (KEY, wanted) if wanted is not None else (GLOO, os.environ.get(GLOO, ""))
    if wanted is None and not names:
        return None
    there = addresses()
    for name in names.split(","):
        if not there.get(name):
            having = ", ".join(other for other, own in there.items() if own)
            raise UsageError(
                f"{by}={names}: {socket.gethostname()} has no interface {name!r} with an address;"
                f" take one of {having}"
            )
    return Interface(names, there[names.split(",")[0]][0], by)


def choose_interface(wanted: str | None, host: str) -> Interface | None:
    """Return the interface that is configured, else that of the route to a host; None without both.

    Args: wanted, runtime.interface.   Raises: as `find_configured`.
    """
    return find_configured(wanted) or find_route(host)


def find_route(host: str) -> Interface | None:
    """Find the interface of the route to a host; None without a route. No packet is sent."""
    try:
        targets = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, target in targets:
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            own = probe.getsockname()[0].partition("%")[0]
            for name, there in addresses().items():
                if own in there:
                    return Interface(name, own)
            if is_loopback(own):  # any of 127.0.0.0/8
                return Interface(LOOPBACK, own)
    return None


def own_address(host: str) -> str:
    """Return the address at which to listen, so that others reach this machine by its name `host`;
    "" = all addresses.

    If the name resolves to loopback here, or to an address that no interface has (NAT), this is the
    address of GLOO_SOCKET_IFNAME, else all addresses.
    """
    if is_loopback(host):
        return "127.0.0.1" if host == LOCAL else host
    known = set[str]()
    with suppress(OSError):
        known = {str(target[0]) for *_, target in socket.getaddrinfo(host, None)}
    found = find_route(host)
    if found is None or found.is_loopback or found.address not in known:
        found = find_configured(None)
    return found.address if found else ""


def replace_loopback(chosen: Interface | None, elsewhere: Iterable[str]) -> Interface | None:
    """Replace loopback, or no interface, by that of a route to another node.

    Args: elsewhere, addresses of processes on other nodes.
    Returns: `chosen` if there is no such route, if the user set it, or if it is not loopback.
    """
    if chosen is not None and (chosen.by or not chosen.is_loopback):
        return chosen
    for address in elsewhere:
        found = find_route(address)
        if found is not None and not found.is_loopback:
            return found
    return chosen


def use_interface(chosen: Interface | None) -> None:
    """Make gloo and NCCL use this interface in this process; None leaves them their own choice.

    A NCCL_SOCKET_IFNAME of the user stays, unless `runtime.interface` is set.
    """
    if chosen is None:
        return
    os.environ[GLOO] = chosen.name
    if chosen.by == KEY or NCCL not in os.environ:
        # "=" makes the name exact: NCCL uses any interface whose name begins with it otherwise
        os.environ[NCCL] = f"={chosen.name}"
