"""The network model against SimGrid: `python -m tests.benchmarks.flows [--csv FILE]`.

Needs Debian's `python3-simgrid`. Flows between hosts start together, or when earlier ones have
arrived. In the model of virtual time a NIC sends and receives one message after the other. In
SimGrid flows share the links by max-min fairness. Errors of finish times are
model / SimGrid − 1: of the last finish, and of the mean finish over all flows.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

from ashl.cluster.network import NicNetwork
from ashl.config.compose import compose
from ashl.config.construct import construct
from tests.benchmarks.table import show, write_csv

PYTHON = "/usr/bin/python3"
FLOWS = Path(__file__).with_name("simgrid_flows.py")
RATE, NBYTES = 125e6, 10_000_000  # bytes per second of a link at factor 1; bytes of a flow
LATENCY_S = 1e-3
COUNTS = (2, 10, 100, 1000)
MEMBERS = (4, 16, 64)
HEAD = ("pattern", "flows", "SimGrid, last (s)", "last", "mean")


class Flow(NamedTuple):
    """A message; it starts once the flows `after` have arrived."""

    src: int
    dst: int
    nbytes: int
    after: tuple[int, ...] = ()


class Pattern(NamedTuple):
    """Flows between hosts; the last host is the server. `factors` slow the hosts' links down."""

    name: str
    factors: tuple[float, ...]
    latency_s: float
    flows: tuple[Flow, ...]


def missing() -> str | None:
    """Return why SimGrid cannot be run here; None if it can."""
    found = subprocess.run([PYTHON, "-c", "import simgrid"], capture_output=True, check=False)
    return None if found.returncode == 0 else "apt-get install python3-simgrid"


def patterns(counts: Sequence[int] = COUNTS, members: Sequence[int] = MEMBERS) -> Iterator[Pattern]:
    """Return patterns of so many flows, and rings of so many members."""
    for n in counts:
        equal, server = (1.0,) * (n + 3), n
        yield Pattern(
            "all push to one", equal, LATENCY_S, tuple(Flow(i, server, NBYTES) for i in range(n))
        )
        yield Pattern(
            "one sends to all", equal, LATENCY_S, tuple(Flow(server, i, NBYTES) for i in range(n))
        )
        yield Pattern(
            "each to the next", equal, LATENCY_S, tuple(Flow(i, i + 1, NBYTES) for i in range(n))
        )
        rng = np.random.default_rng(n)
        slow = (*rng.uniform(1, 2 * n, n).tolist(), 1.0)
        yield Pattern(
            "all push to one, links unequal",
            slow,
            0.0,
            tuple(Flow(i, server, NBYTES) for i in range(n)),
        )
        hosts = max(3, n // 4)
        pairs = [rng.choice(hosts, 2, replace=False) for _ in range(n)]
        yield Pattern(
            "random pairs, four each",
            equal[:hosts],
            LATENCY_S,
            tuple(Flow(int(a), int(b), NBYTES) for a, b in pairs),
        )
        sizes = rng.integers(NBYTES // 10, NBYTES, n)
        yield Pattern(
            "random pairs, four each, all unequal",
            tuple(rng.uniform(1, 4, hosts).tolist()),
            0.0,
            tuple(
                Flow(int(a), int(b), int(size)) for (a, b), size in zip(pairs, sizes, strict=True)
            ),
        )
    for g in members:
        yield Pattern("ring all-reduce", (1.0,) * g, LATENCY_S, ring(g))
        slow = tuple(np.random.default_rng(g).uniform(1, 4, g).tolist())
        yield Pattern("ring all-reduce, links unequal", slow, 0.0, ring(g))


def ring(members: int) -> tuple[Flow, ...]:
    """Return the messages of a ring all-reduce: each is sent on once the one before has arrived."""
    flows = []
    for step in range(2 * (members - 1)):
        for own in range(members):
            before = () if step == 0 else ((step - 1) * members + (own - 1) % members,)
            # a member sends its messages in order
            order = () if step == 0 else ((step - 1) * members + own,)
            flows.append(Flow(own, (own + 1) % members, NBYTES // members, before + order))
    return tuple(flows)


def by_simgrid(pattern: Pattern) -> list[float]:
    """Return the finish times of the flows in SimGrid."""
    hosts = [(RATE / factor, pattern.latency_s) for factor in pattern.factors]
    given = json.dumps({"hosts": hosts, "flows": pattern.flows})
    ran = subprocess.run([PYTHON, FLOWS], input=given, capture_output=True, text=True, check=True)
    return json.loads(ran.stdout.splitlines()[-1])


def by_model(pattern: Pattern) -> list[float]:
    """Return the finish times of the flows in the network model of virtual time."""
    n = len(pattern.factors)
    settings = compose(
        [
            "cluster=homogeneous",
            f"cluster.compute=[{','.join(['1'] * n)}]",
            f"cluster.link=[{','.join(map(repr, pattern.factors))}]",
            "cluster.exchange_s=null",
            f"cluster.latency_s={pattern.latency_s}",
            f"cluster.bandwidth_mbit_s={RATE / 125_000}",
        ]
    )
    ports = NicNetwork(construct(settings["cluster"], "cluster"), NBYTES)
    arrived = [0] * len(pattern.flows)
    waiting = [len(flow.after) for flow in pattern.flows]
    after: list[list[int]] = [[] for _ in pattern.flows]
    for number, flow in enumerate(pattern.flows):
        for other in flow.after:
            after[other].append(number)
    # events in order of time: (nanoseconds, kind, flow, head, tail); kinds are start, head, end
    events = [(0, 0, number, 0, 0) for number, count in enumerate(waiting) if not count]
    while events:
        now, kind, number, head, tail = heappop(events)
        src, dst, nbytes, _ = pattern.flows[number]
        if kind == 0:
            _, head, tail = ports.send_message(src, dst, nbytes, now)
            heappush(events, (head, 1, number, head, tail))
        elif kind == 1:
            heappush(
                events, (ports.queue_at_receiver(src, dst, nbytes, head, tail), 2, number, 0, 0)
            )
        else:
            arrived[number] = now
            for later in after[number]:
                waiting[later] -= 1
                if not waiting[later]:
                    heappush(events, (now, 0, later, 0, 0))
    return [now / 1e9 for now in arrived]


def as_row(pattern: Pattern) -> tuple[str, ...]:
    ours, theirs = by_model(pattern), by_simgrid(pattern)
    errors = (max(ours) / max(theirs) - 1, fmean(ours) / fmean(theirs) - 1)
    cells = (f"{error:+.1%}" for error in errors)
    return pattern.name, str(len(pattern.flows)), f"{max(theirs):.4g}", *cells


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, help="write the table there")
    given = parser.parse_args(arguments)
    if reason := missing():
        print(f"SimGrid is not installed; run `{reason}`", file=sys.stderr)
        return 3
    rows = sorted((as_row(pattern) for pattern in patterns()), key=lambda row: row[0])
    show(
        "Network model against SimGrid",
        HEAD,
        rows,
        "Errors: model / SimGrid - 1, of the last and of the mean finish.",
    )
    if given.csv:
        write_csv(given.csv, HEAD, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
