"""Finish times of flows in SimGrid. Runs in the Python of Debian's `python3-simgrid`, without ashl.

Standard input and output are JSON: hosts as [bytes per second, seconds of latency], and flows as
[source, destination, bytes, numbers of the flows that must have arrived before]; then the seconds
at which each flow has arrived. Links share their bandwidth by max-min fairness, without TCP.
"""

import json
import sys
from functools import partial

import simgrid  # ty: ignore[unresolved-import]

PLAIN = (
    "network/model:CM02",
    "network/crosstraffic:0",
    "network/TCP-gamma:0",
    "network/bandwidth-factor:1",
    "network/latency-factor:1",
    "network/weight-S:0",
)


def cluster(hosts, flows):
    """Return the hosts of a platform: each has a link out and a link in."""
    zone = simgrid.NetZone.create_full_zone("zone")
    made, up, down = [], [], []
    for number, (rate, latency_s) in enumerate(hosts):
        made.append(zone.create_host(f"host-{number}", 1e9))
        for links, way in ((up, "up"), (down, "down")):
            link = zone.create_link(f"{way}-{number}", rate)
            links.append(link.set_latency(latency_s / 2).seal())
    for src, dst in sorted({(flow[0], flow[1]) for flow in flows}):
        route = [simgrid.LinkInRoute(up[src]), simgrid.LinkInRoute(down[dst])]
        zone.add_route(made[src].netpoint, made[dst].netpoint, None, None, route, False)
    zone.seal()
    return made


def send(hosts, flows, arrived) -> None:
    """Start each flow once the flows before it have arrived, and note when it has arrived."""
    waiting = [len(flow[3]) for flow in flows]
    after = [[] for _ in flows]
    for number, flow in enumerate(flows):
        for other in flow[3]:
            after[other].append(number)
    due = [number for number, count in enumerate(waiting) if not count]
    active = []
    while due or active:
        for number in due:
            src, dst, size, _ = flows[number]
            active.append((number, simgrid.Comm.sendto_async(hosts[src], hosts[dst], size)))
        number, _ = active.pop(simgrid.Comm.wait_any([comm for _, comm in active]))
        arrived[number] = simgrid.Engine.clock
        for later in after[number]:
            waiting[later] -= 1
        due = [later for later in after[number] if not waiting[later]]


def main() -> None:
    given = json.load(sys.stdin)
    flows = given["flows"]
    options = [*(f"--cfg={text}" for text in PLAIN), "--log=root.thres:error"]
    engine = simgrid.Engine(["flows", *options])
    hosts, arrived = cluster(given["hosts"], flows), [0.0] * len(flows)
    simgrid.Actor.create("sender", hosts[0], partial(send, hosts, flows, arrived))
    engine.run()
    print(json.dumps(arrived))


main()
