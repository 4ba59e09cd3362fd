"""Two machines made of network namespaces of this one, joined by a pair of interfaces that are shaped both ways.

Needs root, `ip` and `tc` with its token bucket; the host's own interfaces stay as they are.
"""

import os
import subprocess
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

BUCKET_S = 0.0005  # of traffic that may pass at once: a larger one lets a small model through after every pause


def missing() -> str | None:
    """Why none can be made here."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    made = subprocess.run(["ip", "netns", "add", "ashl-probe"], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespace can be made: {made.stderr.strip()}"
    shaped = subprocess.run([*inside("ashl-probe"), *bucket("lo", 100)], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", "ashl-probe"], check=True)
    return f"links cannot be shaped: {shaped.stderr.strip()}" if shaped.returncode else None


@contextmanager
def two_machines(mbit_s: float) -> Generator[list[str]]:
    """Their namespaces; the machines have the addresses 10.79.0.1 and .2 on eth0."""
    names = [f"ashl-{os.getpid()}-{rank}" for rank in (1, 2)]
    try:
        for name in names:
            run("ip", "netns", "add", name)
        run(*f"ip link add eth0 netns {names[0]} type veth peer name eth0 netns {names[1]}".split())
        for rank, name in enumerate(names, 1):
            for command in (
                f"ip addr add 10.79.0.{rank}/24 dev eth0",
                "ip link set lo up",
                "ip link set eth0 up",
            ):
                run(*inside(name), *command.split())
            run(*inside(name), *bucket("eth0", mbit_s))
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def job(names: Sequence[str], port: int, command: Sequence[str], folder: Path, limit_s: float = 300) -> list[str]:
    """Run a command on every machine, as torchrun starts ranks; returns what each printed. Raises AssertionError."""
    world = {"WORLD_SIZE": str(len(names)), "MASTER_ADDR": "10.79.0.1", "MASTER_PORT": str(port)}
    quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    ranks = []
    for rank, name in enumerate(names):
        (folder / str(rank)).mkdir(parents=True, exist_ok=True)
        ranks.append(
            subprocess.Popen(
                [*inside(name), *command],
                cwd=folder / str(rank),
                env=os.environ | world | quiet | {"RANK": str(rank), "PYTHONPATH": os.getcwd()},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        printed = [rank.communicate(timeout=limit_s)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert not any(rank.returncode for rank in ranks), "\n".join(printed)
    return printed


def inside(name: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", name)


def bucket(device: str, mbit_s: float) -> tuple[str, ...]:
    burst = max(8000, round(mbit_s * 1e6 / 8 * BUCKET_S))
    shape = f"tc qdisc replace dev {device} root tbf rate {mbit_s:g}mbit burst {burst} latency 100ms"
    return tuple(shape.split())


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
