"""Describe the stages of a run in words: why they ended, and which never began."""

from collections.abc import Mapping, Sequence
from typing import Any

REASONS = {  # why steps are part of no model, by the key in summary.json
    "late": "came too late or too stale",
    "stage_end": "were in flight when a stage ended",
    "run_end": "were in flight when the run ended",
    "failure": "were of failed workers",
    "diverged": "came after the divergence",
}
# by the rule that ends a stage: the text if it was met, and if not; see `describe_rule`
RULES = {
    "loss": (
        "the running training loss fell to {bound}",
        "the running training loss did not fall to {bound}",
    ),
    "evaluated_loss": ("the loss fell to {bound}", "the loss did not fall to {bound}"),
    "accuracy": ("the accuracy rose to {bound}", "the accuracy did not rise to {bound}"),
    "rises": (
        "the training loss rose in {bound} evaluation{s}",
        "the training loss did not rise in {bound} evaluation{s}",
    ),
    "plateau": (
        "the running loss had not fallen by 1 % for {bound} commit{s} per worker",
        "the running loss was never {bound} commit{s} per worker without falling by 1 %",
    ),
    "epochs": (
        "its {bound} epoch{s} {were} over",
        "the run ended before {bound} epoch{s} of the stage before",
    ),
    "commits": (
        "its {bound} commit{s} per worker {were} over",
        "the run ended before {bound} commit{s} per worker",
    ),
    "seconds": ("its {bound} s were over", "the run ended within {bound} s of the stage before"),
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
EVALUATED = ("evaluated_loss", "accuracy")  # rules that only evaluations judge


def explain_end(stage: Mapping[str, Any]) -> str:
    """Explain why a stage of `summary.json` ended."""
    rule, until = stage.get("exit_reason") or "", stage.get("until") or {}
    if rule in until:
        return describe_rule(rule, until[rule], met=True)
    return ENDS.get(rule, rule or "-")


def describe_rule(rule: str, bound: float, met: bool) -> str:
    """Describe in words that the rule of a stage's end was met, or that it was not."""
    one = bound == 1
    text = RULES[rule][0 if met else 1]
    return text.format(bound=f"{bound:g}", s="" if one else "s", were="was" if one else "were")


def explain_missing_stages(stages: Sequence[Mapping[str, Any]]) -> str:
    """Explain which stages never began, and which condition of the first was not met."""
    names = ", ".join(str(stage["name"]) for stage in stages)
    missing = list[str]()
    for rule, bound in stages[0]["until"].items():
        text = describe_rule(rule, bound, met=False)
        best = stages[0]["best"].get(rule)
        if best is not None and (best <= bound if rule == "evaluated_loss" else best >= bound):
            text = f"{describe_rule(rule, bound, met=True)} only when the run was about to end"
        elif rule in EVALUATED:
            text += (
                " (it was not evaluated; set eval.every_s)"
                if best is None
                else f" (best evaluation: {best:.3g})"
            )
        missing.append(text)
    why = ", and ".join(missing) or "the run ended before"
    return f"stage{'s' if len(stages) > 1 else ''} {names} never began: {why}"


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
