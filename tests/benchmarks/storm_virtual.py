"""A storm over 16 workers in virtual time: `python -m tests.benchmarks.storm_virtual`.

Each worker fails after an exponential time of 480 s on average, so 16 workers have about 60 faults
in 30 minutes. It rejoins after 15 s on average. Steps take 0.5 s, exchanges 0.1 s, a failure is
noticed after 0.2 s. Without gradients. The share is that of the counted steps of the same run
without failures. A mode without waiting cannot exceed the share of time in which workers run, unless
failed workers delayed the others before.
"""

import argparse
from pathlib import Path
from statistics import median

from tests.benchmarks.table import show, write_csv
from tests.support import simulated

MTBF_S, MTTR_S, SECONDS = 480, 15, 1800
CLUSTER = (
    "cluster=homogeneous",
    "cluster.num_workers=16",
    "cluster.step_s=0.5",
    "cluster.exchange_s=0.1",
    "cluster.failure_detection_s=0.2",
    f"stop.seconds={SECONDS}",
    "runtime.gradients=false",
    "schedule=single",
)
MODES = {
    "local SGD by all-reduce": ("topology=all_reduce", "sync=local_sgd"),
    "local SGD at a server": ("sync=local_sgd",),
    "asp": ("sync=asp",),
    "decoupled, 12 of 16": ("sync=decoupled", "sync.min_learners=12"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--local-steps", type=int, nargs="+", default=[2, 20])
    parser.add_argument("--csv", type=Path, help="file to write the table to")
    asked = parser.parse_args()
    rows = [["share of running workers", "", "", f"{MTBF_S / (MTBF_S + MTTR_S):.3f}"]]
    for name, mode in MODES.items():
        for steps in asked.local_steps:
            given = (*CLUSTER, *mode, f"sync.local_steps={steps}")
            whole = simulated(*given).steps_per_s
            shares, faults = [], []
            for seed in asked.seeds:
                churn = f"cluster.churn={{mtbf_s: {MTBF_S}, mttr_s: {MTTR_S}}}"
                ran = simulated(*given, churn, f"seed={seed}")
                shares.append(ran.steps_per_s / whole)
                faults.append(len(ran.of("WorkerFailed")))
            counts = f"{min(faults)} to {max(faults)}"
            rows.append([name, str(steps), counts, f"{median(shares):.3f}"])
            print(*rows[-1], sep=", ", flush=True)
    columns = ["method", "H", "faults", "share of fault-free steps"]
    note = f"median over seeds {', '.join(map(str, asked.seeds))}"
    show("16 workers, 30 minutes", columns, rows, note)
    if asked.csv:
        write_csv(asked.csv, columns, rows)


if __name__ == "__main__":
    main()
