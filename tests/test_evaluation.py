"""Targets, and when they count as reached."""

import math
from dataclasses import replace

import pytest

from ashl.plan.plan import Limits
from ashl.run.evaluation import Evaluation, Target, is_out_of_patience

LIMITS = Limits(
    epochs=None,
    steps=None,
    seconds=None,
    target_accuracy=0.9,
    target_loss=0.2,
    target_consecutive_evals=2,
    eval_every_s=None,
    eval_every_commits=None,
)


@pytest.mark.parametrize(
    ("found", "reached"),
    [
        ([(0.95, 0.5), (0.8, 0.1)], None),  # another one each time
        ([(0.95, 0.5), (0.8, 0.1), (0.8, 0.1)], "target_loss"),
        ([(0.95, 0.5), (0.95, 0.1)], "target_accuracy"),
        (
            [(0.95, 0.1), (0.8, 0.1)],
            "target_loss",
        ),  # both at first: it was counted as the accuracy alone
        ([(0.95, 0.5), (0.8, 0.5), (0.95, 0.5)], None),
    ],
)
def test_each_target_holds_by_itself(found: list[tuple[float, float]], reached: str | None) -> None:
    target, before = Target(), []
    for second, (accuracy, loss) in enumerate(found):
        before.append(
            Evaluation(
                time_s=float(second),
                merges=None,
                train_loss=loss,
                test_loss=loss,
                test_accuracy=accuracy,
            )
        )
        said = target.judge(LIMITS, before)
    assert said == reached
    # The time is that of the first of the two: a method that is evaluated seldom does not pay for
    # the second one.
    assert target.reached_s == (None if reached is None else len(found) - 2)


@pytest.mark.parametrize(("higher", "reached_s"), [(True, 0.0), (False, 2.0)])
def test_the_metric_of_a_task_is_a_target_in_its_own_direction(
    higher: bool, reached_s: float
) -> None:
    limits, target = (
        replace(
            LIMITS,
            target_loss=None,
            target_accuracy=None,
            target_consecutive_evals=1,
            target_metric=5.0,
        ),
        Target(),
    )
    before = []
    for second, metric in enumerate((7.0, 5.5, 4.9)):
        before.append(
            Evaluation(
                time_s=float(second),
                merges=None,
                train_loss=1.0,
                test_loss=1.0,
                test_accuracy=None,
                test_metric=metric,
                higher_is_better=higher,
            )
        )
        target.judge(limits, before)
    assert target.reached_s == reached_s


@pytest.mark.parametrize(
    ("found", "over"),
    [
        (
            [(0.5, 1.0), (0.4, 0.9)],
            False,
        ),  # one evaluation without a new best, where two are allowed
        ([(0.5, 1.0), (0.4, 0.9), (0.5, 1.0)], True),  # an equal one is no new best
        ([(0.5, 1.0), (0.4, 0.9), (0.5, 0.9)], False),  # of equal metrics the test loss decides
        ([(0.5, 1.0), (0.6, 1.0), (0.1, 0.1), (0.1, 0.1)], True),
        ([(0.5, math.nan), (0.5, math.nan), (0.5, math.nan)], False),  # that is a divergence
        ([], False),
    ],
)
def test_patience_ends_with_the_last_evaluation_that_it_allows(
    found: list[tuple[float, float]], over: bool
) -> None:
    evaluations = [
        Evaluation(
            time_s=float(i),
            merges=None,
            train_loss=loss,
            test_loss=loss,
            test_accuracy=metric,
            test_metric=metric,
        )
        for i, (metric, loss) in enumerate(found)
    ]
    assert is_out_of_patience(replace(LIMITS, patience=2), evaluations) == over
    assert not is_out_of_patience(LIMITS, evaluations)
