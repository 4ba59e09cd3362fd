"""Targets, and when they count as reached."""

from dataclasses import replace

import pytest

from ashl.plan.plan import Limits
from ashl.run.evaluation import Evaluation, Target

LIMITS = Limits(
    epochs=None,
    steps=None,
    seconds=None,
    target_accuracy=0.9,
    target_loss=0.2,
    target_hold=2,
    eval_every_s=None,
    eval_every_commits=None,
)


@pytest.mark.parametrize(
    ("found", "reached"),
    [
        ([(0.95, 0.5), (0.8, 0.1)], None),  # another one each time
        ([(0.95, 0.5), (0.8, 0.1), (0.8, 0.1)], "target_loss"),
        ([(0.95, 0.5), (0.95, 0.1)], "target_accuracy"),
        ([(0.95, 0.1), (0.8, 0.1)], "target_loss"),  # both at first: it was counted as the accuracy alone
        ([(0.95, 0.5), (0.8, 0.5), (0.95, 0.5)], None),
    ],
)
def test_each_target_holds_by_itself(found: list[tuple[float, float]], reached: str | None) -> None:
    target = Target()
    for second, (accuracy, loss) in enumerate(found):
        said = target.judge(
            LIMITS,
            Evaluation(time_s=float(second), merges=None, train_loss=loss, test_loss=loss, test_accuracy=accuracy),
        )
    assert said == reached
    assert target.reached_s == (None if reached is None else len(found) - 1)


@pytest.mark.parametrize(("higher", "reached_s"), [(True, 0.0), (False, 2.0)])
def test_the_metric_of_a_task_is_a_target_in_its_own_direction(higher: bool, reached_s: float) -> None:
    limits, target = replace(LIMITS, target_loss=None, target_accuracy=None, target_hold=1, target_metric=5.0), Target()
    for second, metric in enumerate((7.0, 5.5, 4.9)):
        target.judge(
            limits,
            Evaluation(
                time_s=float(second),
                merges=None,
                train_loss=1.0,
                test_loss=1.0,
                test_accuracy=None,
                test_metric=metric,
                higher_is_better=higher,
            ),
        )
    assert target.reached_s == reached_s
