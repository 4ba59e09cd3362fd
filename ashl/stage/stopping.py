"""Decide when a stage or the run ends, and when a snapshot is evaluated: pure functions of the
counts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from ashl.plan.plan import Limits
from ashl.stage.progress import ProgressMark, RunProgress

Scores = Mapping[str, float | None]  # scores of an evaluation


class Counting(Protocol):
    """The state of a rank that counts progress."""

    progress: Any
    evaluated: ProgressMark


@dataclass(frozen=True)
class StopCriteria:
    """The limits of the run, and the rule that ends a stage.

    The lead rank alone evaluates them. Limits on counts alone are evaluated by every rank that
    keeps the same counts, with the same answer.
    """

    limits: Limits
    until: Mapping[str, float]
    epoch_samples: int

    @cached_property
    def deadline_s(self) -> float:
        return math.inf if self.limits.seconds is None else self.limits.seconds

    @cached_property
    def deadline_ns(self) -> float:
        return math.inf if self.limits.seconds is None else round(self.limits.seconds * 1e9)

    def remaining_rounds(
        self, steps: int, samples: int, whole: tuple[int, int]
    ) -> tuple[int, int] | None:
        """Return (a, b): a/b rounds of size `whole` remain until the count that ends the run; None
        if no count ends it.
        """
        limits = self.limits
        by_steps = None if limits.steps is None else (limits.steps - steps, whole[0])
        if limits.epochs is None:
            return by_steps
        by_samples = math.ceil(limits.epochs * self.epoch_samples) - samples, whole[1]
        sooner = by_steps is not None and by_steps[0] / by_steps[1] <= by_samples[0] / by_samples[1]
        return by_steps if sooner else by_samples

    def end_reason(self, progress: RunProgress) -> str | None:
        """Return why the run ends, judged from counts alone, or None."""
        return "diverged" if progress.diverged else self.reached_limit(progress)

    def reached_limit(self, progress: RunProgress) -> str | None:
        """Return the limit on counts that is reached, or None. Divergence is ignored, because the
        rank that knows the losses first has to tell the others.
        """
        if self.limits.steps is not None and progress.steps >= self.limits.steps:
            return "steps"
        if (
            self.limits.epochs is not None
            and progress.samples >= self.limits.epochs * self.epoch_samples
        ):
            return "epochs"
        return None

    def stage_end_reason(
        self, progress: RunProgress, now_s: float, scores: Scores | None
    ) -> str | None:
        """Return the rule that ends this stage, and with the last stage the run, or None.

        - loss: the running loss of the workers' minibatches is at most the bound.
        - evaluated_loss, accuracy: as last evaluated.
        - rises: number of evaluations of the whole run with a higher training loss than the
        evaluation before.
        - plateau: commits per worker without a decrease of the running loss by 1 %.
        - epochs, commits (per worker), seconds: counted from the begin of the stage.
        """
        if not self.until:
            return None
        n, start, scores = progress.num_workers, progress.started, scores or {}
        loss, accuracy = scores.get("train_loss"), scores.get("test_accuracy")
        now = {
            "loss": -progress.loss,
            "evaluated_loss": -math.inf if loss is None else -loss,
            "accuracy": -math.inf if accuracy is None else accuracy,
            "rises": scores.get("rises") or 0.0,
            "plateau": (progress.total_commits - progress.best[1]) / n,
            "epochs": (progress.samples - start.samples) / self.epoch_samples,
            "commits": (progress.total_commits - start.commits) / n,
            "seconds": now_s - start.seconds,
        }
        for rule, bound in self.until.items():
            if now[rule] >= (-bound if rule.endswith("loss") else bound):
                return rule
        return None

    def evaluation_due(self, progress: RunProgress, last: ProgressMark, now_s: float) -> bool:
        """Return True if an evaluation is due after the last one: every `eval.every_s` seconds or
        `eval.every_commits` commits, else once per epoch.
        """
        limits = self.limits
        if limits.eval_every_s is not None:
            return now_s // limits.eval_every_s > last.seconds // limits.eval_every_s
        if limits.eval_every_commits is not None:
            return (
                progress.total_commits // limits.eval_every_commits
                > last.commits // limits.eval_every_commits
            )
        return progress.samples // self.epoch_samples > last.samples // self.epoch_samples

    def take_evaluation(self, state: Counting, now_s: float) -> bool:
        """Return True if an evaluation is due, and count the next one from here."""
        if due := self.evaluation_due(state.progress, state.evaluated, now_s):
            state.evaluated = state.progress.mark_at(now_s)
        return due
