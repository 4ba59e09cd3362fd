"""Describe the stages of a run in words."""

from collections.abc import Mapping
from typing import Any

REASONS = {  # why steps are part of no model, by the key in summary.json
    "late": "came too late or too stale",
    "stage_end": "were in flight when a stage ended",
    "run_end": "were in flight when the run ended",
    "failure": "were of failed workers",
    "diverged": "came after the divergence",
}
RULES = {  # by the rule that ends a stage
    "loss": "the running training loss fell to {}",
    "evaluated_loss": "the loss fell to {}",
    "accuracy": "the accuracy rose to {}",
    "rises": "the training loss rose in {} evaluations",
    "plateau": "the running loss had not fallen by 1 % for {} commits per worker",
    "epochs": "its {} epochs were over",
    "commits": "its {} commits per worker were over",
    "seconds": "its {} s were over",
}
ENDS = {
    "profiled": "everything was measured",
    "epochs": "the run's epochs were over",
    "steps": "the run's steps were over",
    "seconds": "the run's seconds were over",
    "target_accuracy": "the target was reached",
    "target_loss": "the target was reached",
    "target_metric": "the target was reached",
    "patience": "there was no new best for stop.patience evaluations",
}


def explain_end(stage: Mapping[str, Any]) -> str:
    """Explain why a stage of `summary.json` ended."""
    rule, until = stage.get("exit_reason") or "", stage.get("until") or {}
    if rule in until:
        return RULES[rule].format(f"{until[rule]:g}")
    return ENDS.get(rule, rule or "-")


def explain_drops(summary: Mapping[str, Any]) -> str:
    """Explain the dropped steps by reason, in words; "" if no reason is recorded."""
    counted = summary.get("dropped_for") or {}
    return ", ".join(
        f"{count:,} {REASONS.get(reason, reason)}" for reason, count in counted.items()
    )


def measure_profiling(summary: Mapping[str, Any]) -> tuple[float, list[float]]:
    """Measure the seconds of profiling on the run's clock, and each worker's waiting in them."""
    stages = [stage for stage in summary.get("stages") or () if stage.get("profiling")]
    waits = [stage["wait_s"] for stage in stages]
    return sum(stage["end_s"] - stage["start_s"] for stage in stages), [
        sum(own) for own in zip(*waits, strict=True)
    ]


def training_wait_share(summary: Mapping[str, Any]) -> float | None:
    """Return the share of waiting in the workers' time without profiling; None without both."""
    profiled_s, waits = measure_profiling(summary)
    training_s = (summary.get("time_s") or 0.0) - profiled_s
    if not waits or training_s <= 0:
        return None
    waited_s = sum(worker["wait_s"] for worker in summary["workers"]) - sum(waits)
    return waited_s / (len(waits) * training_s)
