"""Ray: a script that reserves a bundle of resources per rank, and runs each rank in an actor."""

from collections.abc import Mapping
from typing import Any

from ashl.launch.job import Launch, random_port

TEMPLATE = '''"""Run the ranks of a job of ashl on a Ray cluster: one actor per rank."""
import os, subprocess, sys
try:
    import ray
except ImportError:
    sys.exit("ashl: --on ray needs a package: pip install 'ashl[ray]'")

BUNDLES = {bundles!r}
COMMAND = {command!r}
FOLDER = {folder!r}
PORT = "{port}"
NAMES = {names!r}  # variables of this process that every rank gets
# restarts of the actor of each rank but 0, for example after its node has failed
RESTARTS = {restarts}
PATIENCE_S = 5  # seconds to wait for resources before it says so


@ray.remote
class Rank:
    def address(self):
        return ray.util.get_node_ip_address()

    def run(self, rank, master, env):
        known = {{"RANK": str(rank), "WORLD_SIZE": str(len(BUNDLES)), "MASTER_ADDR": master}}
        env = {{**os.environ, **env, **known, "MASTER_PORT": PORT}}
        return subprocess.run(COMMAND, cwd=FOLDER, env=env).returncode


try:
    ray.init(address=os.environ.get("RAY_ADDRESS"), log_to_driver=True)
except ConnectionError as error:
    sys.exit(f"ashl: {{error}}")
group = ray.util.placement_group(BUNDLES, strategy={strategy!r})
if not group.wait(PATIENCE_S):
    has = {{name: n for name, n in ray.available_resources().items() if "memory" not in name}}
    print(f"ashl: waits until Ray has free, all at once: {{BUNDLES}}; now {{has}}", file=sys.stderr)
    ray.get(group.ready())
place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
ranks = [
    Rank.options(
        num_cpus=bundle.get("CPU", 0),
        num_gpus=bundle.get("GPU", 0),
        resources={{name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}},
        max_restarts=RESTARTS if number else 0,
        max_task_retries=RESTARTS if number else 0,
        scheduling_strategy=place(group, placement_group_bundle_index=number),
    ).remote()
    for number, bundle in enumerate(BUNDLES)
]
master = ray.get(ranks[0].address.remote())
env = {{name: os.environ[name] for name in NAMES if name in os.environ}}
pending = {{of.run.remote(rank, master, env): rank for rank, of in enumerate(ranks)}}
codes = {{}}
while pending:
    done, _ = ray.wait(list(pending))
    rank = pending.pop(done[0])
    try:
        codes[rank] = ray.get(done[0])
    except ray.exceptions.RayActorError as error:
        codes[rank] = 1
        print(f"rank {{rank}}: its actor died", file=sys.stderr)
    if rank == 0:
        break  # the process of rank 0 ends last, and has the run's exit code
sys.exit(codes[0])
'''


def bundles(launch: Launch) -> list[dict[str, float]]:
    """Return the resources of each rank: a core, and the resource that its line of the hosts file
    names, as `KEY=AMOUNT` (`GPU=1`, `fast=1`) or as the name of a node.
    """
    found: list[dict[str, float]] = []
    for share in launch.shares:
        key, value = share.machine.kind or (f"node:{share.machine.name}", "0.001")
        found += [{"CPU": 1.0, key: float(value)} for _ in share.ranks]
    return found or [{"CPU": 1.0} for _ in range(launch.size)]


def script(launch: Launch) -> str:
    """Return the script of Python that runs the job on a Ray cluster.

    An option `strategy=STRICT_SPREAD` chooses how Ray places the bundles (default PACK).
    """
    options: Mapping[str, Any] = dict(option.partition("=")[::2] for option in launch.options)
    return TEMPLATE.format(
        bundles=bundles(launch),
        command=launch.rank_command,
        folder=launch.folder,
        port=random_port(),
        names=sorted(launch.env),
        restarts=launch.restarts,
        strategy=options.get("strategy", "PACK"),
    )
