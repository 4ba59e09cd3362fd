"""What is known before anything runs: what the workers cost, who does what, and what it should reach."""

from rich.console import Console
from rich.table import Table

from ashl.plan.plan import Plan, StagePlan
from ashl.plan.profile import Profile
from ashl.tracking.console import number, percent, seconds


def show_profile(console: Console, profile: Profile) -> None:
    """Print what a step, a push, a pull and an encoding cost each worker."""
    console.print(f"[bold]profile[/] {profile.source}, {profile.model} with {profile.num_params:,} parameters")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("worker", "step ms", "± ms", "push ms", "pull ms", "latency ms", "up MB/s", "down MB/s", "encode ms"):
        table.add_column(title, justify="right", no_wrap=True)
    for rank, worker in enumerate(profile.workers):
        costs = (worker.step_s, worker.step_spread_s, worker.push_s, worker.pull_s, worker.latency_s)
        rates = ("-" if rate is None else f"{rate / 1e6:.3g}" for rate in (worker.push_bytes_s, worker.pull_bytes_s))
        table.add_row(str(rank), *(f"{1e3 * cost:.3g}" for cost in costs), *rates, f"{1e3 * worker.compress_s:.3g}")
    console.print(table)


def forecast(console: Console, plan: Plan, profile: Profile | None = None) -> None:
    """Print each stage with its workers, the predicted rates, and the predicted time where the run ends by steps.

    With a profile, the cycle at the same H for all is beside the planned one.
    """
    console.print(f"[bold]{plan.name}[/] {plan.num_workers} workers, {plan.num_params:,} parameters, seed {plan.seed}")
    for stage in plan.stages:
        console.print(stage_table(stage, profile))
        rate = stage.predicted_steps_per_s
        if rate is None:
            known = "it only measures" if stage.name == "profile" else "the cluster declares no costs"
            console.print(f"steps/s and waiting are not predicted: {known}")
            continue
        waiting = percent(stage.predicted_wait_share)
        console.print(f"predicted {number(rate)} steps/s, workers wait {waiting} of their time")
        if plan.limits.steps and len(plan.stages) == 1:
            console.print(f"predicted {seconds(plan.limits.steps / rate)} for {plan.limits.steps:,} steps")


def stage_table(stage: StagePlan, profile: Profile | None) -> Table:
    until = ", ".join(f"{rule} {bound:g}" for rule, bound in stage.until.items())
    title = f"stage {stage.name}" + (f", until {until}" if until else "")
    columns = ["worker", "H", "batch", "data share", "kept", "cycle"]
    before = profile if stage.h_preset is not None else None
    if before:
        columns.append(f"cycle at H {stage.h_preset}")
    table = Table(*columns, title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for rank, worker in enumerate(stage.workers):
        shares = percent(worker.data_share), percent(worker.compression_ratio, 0)
        row = [str(rank), str(worker.local_steps), str(worker.batch), *shares, seconds(worker.predicted_cycle_s)]
        if before:
            costs = before.workers[rank]
            row.append(seconds((stage.h_preset or 0) * costs.step_s + costs.push_s + costs.pull_s))
        table.add_row(*row)
    return table
