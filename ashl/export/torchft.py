"""A run with torchft, where workers may fail and come back: BSP by its DistributedDataParallel, local SGD, and DiLoCo,
in fragments where the run has them.

Each worker is a replica group of one process, which a lighthouse brings together. A round counts when all that take
part have committed it; a worker that comes back gets the model and both optimizers from another one.

Limits: torchft sends a fragment `delay` steps before the end of H, and ashl at the end, to land `delay` steps later; so
all exchanges come that much earlier. Source: torchft 2026.10, https://github.com/meta-pytorch/torchft.
"""

from itertools import accumulate
from math import prod
from pathlib import Path
from textwrap import indent

from ashl.compression.none import Dense
from ashl.errors import UsageError
from ashl.export.frame import INNER, Own, Run, framed, local_steps, opened, out_of_step, rate_set, unlike, why_not
from ashl.outer.average import Average
from ashl.outer.contract import Outer
from ashl.outer.heavy_ball import HeavyBall
from ashl.outer.nesterov import Nesterov
from ashl.overlap.streaming import Streaming

START = """torchft_lighthouse --min_replicas {num_workers} --join_timeout_ms 10000
TORCHFT_LIGHTHOUSE=http://localhost:29510 python {name} RANK   # of each worker, from 0 on

A worker that failed is started again in the same way."""
MANAGED = """    kept = {"model": net, "optimizer": inner}  # what a worker that comes back is given by another one
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        ProcessGroupGloo(),
        load_state_dict=lambda found: [part.load_state_dict(found[name]) for name, part in kept.items()],
        state_dict=lambda: {name: part.state_dict() for name, part in kept.items()},
        min_replica_size=WORKERS,  # with fewer than these, no round counts
        use_async_quorum=False,
        init_sync=False,  # all begin with the same seed
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        replica_id=f"worker{rank}",
    )
"""
GRADIENTS = """    inner = Optimizer(manager, inner)
    net = DistributedDataParallel(manager, net)
"""
MODELS = """    with LocalSGD(manager, net, inner, LOCAL_STEPS):
"""
WHOLE = """    outer = {outer}
    with DiLoCo(manager, [net], inner, outer, LOCAL_STEPS):
"""
FRAGMENTS = """    params = list(net.parameters())
    parts = [nn.ParameterList([params[k] for k in places]) for places in FRAGMENTS]
    outer = [{outer} for net in parts]
    with DiLoCo(
        manager,
        parts,
        inner,
        outer,
        LOCAL_STEPS * len(parts),
        fragment_sync_delay={delay},
        fragment_update_alpha={alpha},
    ):
"""
COUNTED = f"""    while (k := manager.current_step()) < ROUNDS:
{rate_set("k * BATCH * LOCAL_STEPS * WORKERS")}{local_steps("LOCAL_STEPS")}        yield sum(losses) / len(losses)
"""
END = "    manager.shutdown()\n"
YIELDS = "The mean loss of each round: {}"
TORCHFT, LOCAL = "from torchft import {}Manager, {}ProcessGroupGloo", "from torchft.local_sgd import {}"
MERGES = {"average": Average, "heavy_ball": HeavyBall, "nesterov": Nesterov}


def script(run_dir: Path, name: str = "train_torchft.py") -> str:
    """The script of a run. Raises UsageError for what torchft does not have, with the reason."""
    run = opened(run_dir)
    if why := refused(run):
        raise UsageError(f"{run_dir} cannot be written for torchft: {why}.")
    imported, wrapped, does = wrapped_by(run)
    places = f"\nFRAGMENTS = {places_of(run)}  # of the model's parameters, one of which is exchanged in a round"
    own = Own(
        tool="with torchft",
        start=START,
        imports=("import sys", "from torch.distributed import TCPStore", *imported),
        constants=f"LOCAL_STEPS = {run.steps[0]}  # of each worker in a round" + (places if streams(run) else ""),
        rounds=max(1, round(sum(run.totals()) / sum(run.steps))),
        yields=YIELDS.format(does),
        train=INNER + MANAGED + wrapped + (indent(COUNTED, 4 * " ") if "with " in wrapped else COUNTED) + END,
        main=("    rank = int(sys.argv[1])", ""),
        needs="torchft (pip install torchft-nightly), and ",
    )
    return framed(run, name, own)


def refused(run: Run) -> str | None:
    """What of it torchft does not have."""
    why = why_not(run, lambda codec: isinstance(codec, Dense), "none", MERGES)
    return why or (None if streams(run) else out_of_step(run)) or unlike(run)


def streams(run: Run) -> bool:
    return isinstance(run.own.overlap, Streaming)


def wrapped_by(run: Run) -> tuple[tuple[str, ...], str, str]:
    """(imports, what goes around the model and its optimizer, what a round does after its steps)."""
    outer, overlap = run.own.outer, run.own.overlap
    if not run.differences:
        return (TORCHFT.format("DistributedDataParallel, ", "Optimizer, "),), GRADIENTS, "one on the mean gradient"
    plain = TORCHFT.format("", "")
    if isinstance(overlap, Streaming):
        wrapped = FRAGMENTS.format(outer=outer_of(outer), delay=overlap.delay, alpha=overlap.alpha)
        return (plain, LOCAL.format("DiLoCo")), wrapped, "the outer optimizer on the mean of a fragment's differences"
    if isinstance(outer, HeavyBall | Nesterov):
        wrapped = WHOLE.format(outer=outer_of(outer))
        return (
            (plain, LOCAL.format("DiLoCo")),
            wrapped,
            "the outer optimizer on the mean of their differences",
        )
    return (plain, LOCAL.format("LocalSGD")), MODELS, "the mean of all models"


def outer_of(outer: Outer) -> str:
    """The optimizer that steps on what is merged: its gradient is the difference, turned round."""
    if not isinstance(outer, HeavyBall | Nesterov):
        return "torch.optim.SGD(net.parameters(), 1.0)"
    ahead = isinstance(outer, Nesterov) and outer.momentum > 0
    return f"torch.optim.SGD(net.parameters(), {outer.lr}, {outer.momentum}, nesterov={ahead})"


def places_of(run: Run) -> list[list[int]]:
    """Which of the model's parameters each fragment has."""
    stops = list(accumulate(prod(shape) for _, shape in run.plan.layers))
    runs = [fragment.runs for fragment in run.stage.fragments]
    return [[k for k, stop in enumerate(stops) if any(a < stop <= b for a, b in own)] for own in runs]
