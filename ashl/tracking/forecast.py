"""What a plan says before anything runs: who does what, and what it should reach."""

from rich.console import Console
from rich.table import Table

from ashl.plan.plan import Plan
from ashl.tracking.console import number, percent, seconds


def forecast(console: Console, plan: Plan) -> None:
    """Print each stage with its workers, the predicted rates, and the predicted time where the run ends by steps."""
    console.print(f"[bold]{plan.name}[/] {plan.num_workers} workers, {plan.num_params:,} parameters, seed {plan.seed}")
    for stage in plan.stages:
        table = Table(
            "worker", "H", "batch", "data share", "kept", "cycle", title=f"stage {stage.name}", title_justify="left"
        )
        for rank, worker in enumerate(stage.workers):
            cycle = seconds(worker.predicted_cycle_s)
            share, kept = percent(worker.data_share), percent(worker.compression_ratio, 0)
            table.add_row(str(rank), str(worker.local_steps), str(worker.batch), share, kept, cycle)
        console.print(table)
        rate = stage.predicted_steps_per_s
        if rate is None:
            console.print("steps/s and waiting are not predicted: the cluster declares no costs")
            continue
        waiting = percent(stage.predicted_wait_share)
        console.print(f"predicted {number(rate)} steps/s, workers wait {waiting} of their time")
        if plan.limits.steps:
            console.print(f"predicted {seconds(plan.limits.steps / rate)} for {plan.limits.steps:,} steps")
