"""Machines made of network namespaces of this one, joined by a bridge, each behind a link that is
shaped both ways.

Each has its own loopback, its own host name and, as Debian writes it, a file of hosts in which that
name is loopback. Needs root, `ip` and `tc` with its token bucket; the host's own interfaces stay as
they are.
"""

import os
import shutil
import subprocess
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

# of traffic that may pass at once, or two frames: more lets small models through after a pause
BUCKET_S = 0.0005
# of the bucket, which a packet may fill that is not to be cut; the rest are headers of its frames
WHOLE = 0.94
HOSTS = Path(
    "/etc/netns"
)  # `ip netns exec` mounts what lies there in a folder of the namespace's name over /etc


def missing() -> str | None:
    """Why none can be made here."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = f"ashl-probe-{os.getpid()}"  # others may be asking at the same time
    made = subprocess.run(
        ["ip", "netns", "add", probe], capture_output=True, text=True, check=False
    )
    if made.returncode:
        return f"no network namespace can be made: {made.stderr.strip()}"
    shaped = subprocess.run(
        [*inside(probe), *bucket("lo", 100)], capture_output=True, text=True, check=False
    )
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return f"links cannot be shaped: {shaped.stderr.strip()}" if shaped.returncode else None


def no_sshd() -> str | None:
    """Why `ssh_between` would not do here."""
    return None if shutil.which("sshd", path="/usr/sbin:/usr/bin") else "there is no sshd"


@contextmanager
def machines(*mbit_s: float) -> Generator[list[str]]:
    """Make one machine per rate; yield their names, which are also those of their namespaces."""
    switch, names = (
        f"ashl-{os.getpid()}-0",
        [f"ashl-{os.getpid()}-{k}" for k in range(1, len(mbit_s) + 1)],
    )
    try:
        run("ip", "netns", "add", switch)
        run(*f"ip -n {switch} link add br0 type bridge".split())
        run(*f"ip -n {switch} link set br0 up".split())
        for name, rate in zip(names, mbit_s, strict=True):
            plug_in(name, switch, rate)
        yield names
    finally:
        for name in (switch, *names):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
            shutil.rmtree(HOSTS / name, ignore_errors=True)


def plug_in(name: str, switch: str, mbit_s: float) -> None:
    """One more machine: eth0 leads to the port of the switch that has the machine's name.

    Packets are as large as the bucket, as they are for a network card that cuts them itself. A
    bucket that has to cut them into frames takes half of a core for it, at any rate.
    """
    run("ip", "netns", "add", name)
    run(*f"ip link add eth0 netns {name} type veth peer name {port(name)} netns {switch}".split())
    whole = f"link set eth0 up gso_max_size {min(65536, int(WHOLE * burst(mbit_s)))}"
    for command in (f"addr add {address(name)}/24 dev eth0", "link set lo up", whole):
        run("ip", "-n", name, *command.split())
    run(*f"ip -n {switch} link set {port(name)} master br0 up".split())
    for end, device in ((name, "eth0"), (switch, port(name))):
        run(*inside(end), *bucket(device, mbit_s))
    (HOSTS / name).mkdir(parents=True)
    (HOSTS / name / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")


def port(name: str) -> str:
    return f"p{name.rpartition('-')[2]}"


def address(name: str) -> str:
    """Return the address of a machine on eth0."""
    return f"10.79.0.{name.rpartition('-')[2]}"


def cut(name: str, down: bool = True) -> None:
    """Take a machine off the network, or mend its link."""
    switch = f"{name.rpartition('-')[0]}-0"
    run(*f"ip -n {switch} link set {port(name)} {'down' if down else 'up'}".split())


def start(
    name: str, command: Sequence[str], folder: Path, env: Mapping[str, str]
) -> subprocess.Popen:
    """A command on a machine, in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    return subprocess.Popen(
        [*inside(name), *command],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def job(
    names: Sequence[str], port: int, command: Sequence[str], folder: Path, limit_s: float = 300
) -> list[str]:
    """Run a command as torchrun starts ranks, each on the machine that is named for it; returns
    what each printed. Raises AssertionError.
    """
    world = {
        "WORLD_SIZE": str(len(names)),
        "MASTER_ADDR": address(names[0]),
        "MASTER_PORT": str(port),
    }
    ranks = [
        start(
            name,
            command,
            folder / str(rank),
            world | {"RANK": str(rank), "GLOO_SOCKET_IFNAME": "eth0"},
        )
        for rank, name in enumerate(names)
    ]
    try:
        printed = [rank.communicate(timeout=limit_s)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert not any(rank.returncode for rank in ranks), "\n".join(printed)
    return printed


def inside(name: str) -> tuple[str, ...]:
    """Return the prefix of a command that runs it on this machine."""
    named = ("unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', name)
    return ("ip", "netns", "exec", name, *named)


def bucket(device: str, mbit_s: float) -> tuple[str, ...]:
    shape = (
        f"tc qdisc replace dev {device} root tbf rate {mbit_s:g}mbit burst {burst(mbit_s)} latency"
        " 100ms"
    )
    return tuple(shape.split())


def burst(mbit_s: float) -> int:
    """Bytes that a bucket holds."""
    return max(3000, round(mbit_s * 1e6 / 8 * BUCKET_S))


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextmanager
def ssh_between(names: Sequence[str], folder: Path) -> Generator[str]:
    """Run an sshd on each machine for the key that is made in this folder; yield the ssh command."""
    for key in ("host", "user"):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key))
    public = (folder / "host.pub").read_text()
    (folder / "known").write_text(f"{address('net-*')} {public}")
    (folder / "sshd").write_text(
        f"HostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\nStrictModes no\nUsePAM"
        " no\nPidFile none\nPasswordAuthentication no\nPermitRootLogin prohibit-password\n"
    )
    (folder / "client").write_text(
        f"Host *\n  IdentityFile {folder}/user\n  UserKnownHostsFile {folder}/known\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    command = ["/usr/sbin/sshd", "-D", "-e", "-f", str(folder / "sshd")]
    servers = [
        subprocess.Popen([*inside(name), *command], stderr=subprocess.DEVNULL) for name in names
    ]
    try:
        yield f"ssh -F {folder}/client"
    finally:
        for server in servers:
            server.terminate()
            server.wait()
