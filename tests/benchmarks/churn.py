"""The cost of failures by mode: `python -m tests.benchmarks.churn`; `--only TEXT` = modes with this
in their name.

Sixteen unequal workers (factors 1, 1.5, 2 and 3) with or without a parameter server, in virtual
time without gradients, for 2,000 s. Steps take 0.5 s. Each worker fails after an exponential time
of this mean, and rejoins after 5 s on average. Goodput is the counted steps/s relative to those of
the same run without failures. A mode without waiting cannot exceed the share of time in which
workers run. A mode below that share also loses unfinished work, or waits.
"""

import argparse
from statistics import median

from tests.benchmarks.table import show
from tests.support import simulated

CLUSTER = (
    "cluster=mixed",
    "cluster.num_workers=16",
    "cluster.step_s=0.5",
    "cluster.exchange_s=0.1",
    "stop.seconds=2000",
    "runtime.gradients=false",
)
GROUPS = (
    "topology=partial_all_reduce",
    "sync=ripples_smart",
    "sync.group_size=4",
    "sync.local_steps=8",
)
DECOUPLED = ("sync=decoupled", "sync.local_steps=8", "sync.grace_s=1", "sync.min_learners=8")
MODES = {
    "bsp": ("sync=bsp",),
    "backup, 4 of 16": ("sync=backup", "sync.backups=4"),
    "local SGD, H = 8": ("sync=local_sgd", "sync.local_steps=8"),
    "ssp, 3 ahead": ("sync=ssp", "sync.staleness=3"),
    "asp": ("sync=asp",),
    "bsp by all-reduce": ("topology=all_reduce", "sync=bsp"),
    "local SGD by all-reduce, H = 8": (
        "topology=all_reduce",
        "sync=local_sgd",
        "sync.local_steps=8",
    ),
    "Ripples smart, H = 8": GROUPS,
    "Ripples smart, H = 8, threshold 1": (*GROUPS, "sync.threshold=1"),
    "d_psgd on a ring": ("topology=gossip", "topology.graph=ring", "sync=d_psgd"),
    "noloco, H = 8": (
        "topology=gossip",
        "topology.graph=complete",
        "sync=noloco",
        "sync.local_steps=8",
    ),
    "ad_psgd on a ring, H = 8": (
        "topology=gossip",
        "topology.graph=ring",
        "sync=ad_psgd",
        "sync.local_steps=8",
    ),
    "ahl, H from 4": ("sync=ahl", "schedule.h_preset=[4]"),
    "shl, H from 2": ("sync=shl", "schedule.h_preset=[2]"),
    "decoupled, H = 8, 8 of 16": DECOUPLED,
    "decoupled, H = 8, 1 of 16": (*DECOUPLED[:-1], "sync.min_learners=1"),
    "fedbuff, 4 of 16": ("sync=fedbuff", "sync.buffer=4"),
}
MTBF_S, MTTR_S, SEEDS = (10, 30, 100, 300, 1000), 5, (0, 1, 2)


def goodputs(mode: tuple[str, ...]) -> list[float]:
    """Return the median over the seeds for each mean time between failures."""
    whole = simulated(*CLUSTER, *mode).steps_per_s
    churn = [f"cluster.churn={{mtbf_s: {mtbf_s}, mttr_s: {MTTR_S}}}" for mtbf_s in MTBF_S]
    return [
        median(simulated(*CLUSTER, *mode, at, f"seed={s}").steps_per_s / whole for s in SEEDS)
        for at in churn
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    only = parser.parse_args().only
    rows = {"workers there": [mtbf_s / (mtbf_s + MTTR_S) for mtbf_s in MTBF_S]}
    rows |= {name: goodputs(mode) for name, mode in MODES.items() if only in name}
    columns = ["mean time between failures", *(f"{mtbf_s} s" for mtbf_s in MTBF_S)]
    note = f"medians over seeds {', '.join(map(str, SEEDS))}"
    show(
        "goodput",
        columns,
        [[name, *(f"{value:.3f}" for value in values)] for name, values in rows.items()],
        note,
    )


if __name__ == "__main__":
    main()
