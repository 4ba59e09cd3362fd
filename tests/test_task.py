"""Tasks: their losses and metrics against closed forms, and what of a run depends on them."""

import math

import numpy as np
import pytest
import torch
from conf_option import conf_option
from torch import nn
from torch.nn import functional

from ashl.data.dataset import Data, Split
from ashl.errors import DataMissingError, UsageError
from ashl.learn.learner import Learner
from ashl.report.tables import RARE, USUAL
from ashl.run.evaluation import Evaluation, best_of
from ashl.task.contract import TAKEN_NAMES, recorded_name, renaming_note
from ashl.task.plain import plain_task
from tests.support import simulated

JUDGES = [
    "classification",
    {"_target_": "ashl.task.classification.Classification"},
    {"_target_": "ashl.task.classification.Classification", "ignore_index": -100},
]


@pytest.mark.parametrize("judged", JUDGES)
def test_a_loss_is_judged_by_a_task_with_the_defaults_of_its_file(judged) -> None:
    task = plain_task(nn.CrossEntropyLoss, {"label_smoothing": 0.1, "judged": judged})
    assert task.metric == "accuracy"
    assert task.ignore_index == -100


@pytest.mark.parametrize("judged", [None, "clasification", 3])
def test_a_loss_that_no_task_judges_is_refused(judged) -> None:
    with pytest.raises(
        UsageError, match="judged: classification; there are classification, language_model"
    ):
        plain_task(functional.huber_loss, {"judged": judged})


class FixedModel:
    """A model option: one module, made again."""

    def __init__(self, make):
        self.make = make

    def build(self, sample_shape, num_classes):
        return self.make()


def values(count, outputs, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 3, generator=generator)
    return Split(inputs, 4 + inputs @ torch.randn(3, outputs, generator=generator))


def tokens(count, length, words, seed):
    drawn = torch.randint(words, (count, length + 1), generator=torch.Generator().manual_seed(seed))
    return Split(drawn[:, :-1], drawn[:, 1:].clone())


def outputs_of(learner, option, params, split):
    module = option.make()
    nn.utils.vector_to_parameters(params.clone(), module.parameters())
    return module(split.inputs).detach()


def test_r2_and_mae_are_those_of_the_whole_test_set():
    """650 samples are two batches of an evaluation, of unequal size."""
    data = Data(values(20, 2, 0), values(650, 2, 0), sample_shape=(3,), num_classes=2)
    option = FixedModel(lambda: nn.Linear(3, 2))
    for metric in ("r2", "mae"):
        learner = Learner(option, data, conf_option("task", "regression", metric=metric), seed=0)
        params = learner.init()
        error = (outputs_of(learner, option, params, data.test) - data.test.targets).double()
        spread = (data.test.targets - data.test.targets.double().mean(0)).square().sum()
        expected = {"r2": 1 - error.square().sum() / spread, "mae": error.abs().mean()}[metric]
        found = learner.evaluate(params)
        assert found["test_accuracy"] is None
        assert found["test_metric"] == pytest.approx(float(expected), rel=1e-6)
        assert found["test_loss"] == pytest.approx(float(error.square().mean()) / 2, rel=1e-5)


def test_perplexity_counts_tokens_and_leaves_out_what_is_marked():
    data = Data(tokens(8, 5, 7, 0), tokens(11, 5, 7, 1), sample_shape=(5,), num_classes=7)
    data.test.targets[0, 1:] = -100
    option = FixedModel(lambda: nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)))
    learner = Learner(option, data, conf_option("task", "language_model"), seed=0)
    params = learner.init()
    outputs = outputs_of(learner, option, params, data.test)
    nll = functional.cross_entropy(outputs.flatten(0, 1), data.test.targets.flatten())
    assert learner.evaluate(params)["test_metric"] == pytest.approx(math.exp(nll), rel=1e-5)
    by_accuracy = Learner(
        option, data, conf_option("task", "language_model", metric="accuracy"), seed=0
    )
    right = (outputs.argmax(2) == data.test.targets).sum() / (data.test.targets != -100).sum()
    found = by_accuracy.evaluate(params)
    assert found["test_accuracy"] == found["test_metric"] == pytest.approx(float(right))


@pytest.mark.parametrize(
    ("task", "data", "words"),
    [
        ("classification", "quadratic", "values, not classes; take task=regression"),
        ("regression", "digits", "targets are classes; take task=classification"),
        ("language_model", "digits", "a token at every place"),
    ],
)
def test_targets_that_a_task_cannot_learn(task, data, words):
    with pytest.raises(UsageError, match=words):
        Learner(
            conf_option("model", "linear"),
            conf_option("dataset", data).load(),
            conf_option("task", task),
            seed=0,
        )


def test_the_best_evaluation_is_that_with_the_best_metric():
    """Where lower is better, the lowest; where there is none, the one with the lowest loss; what is
    no number never.
    """

    def found(metric, loss, higher):
        return Evaluation(
            time_s=0.0, merges=0, train_loss=loss, test_loss=loss, test_accuracy=None, test_metric=metric,
            higher_is_better=higher,
        )  # fmt: skip

    low = [found(3.0, 1.0, False), found(2.0, 9.0, False), found(math.nan, 0.1, False)]
    assert best_of(low) is low[1]
    high = [found(3.0, 1.0, True), found(2.0, 0.5, True)]
    assert best_of(high) is high[0]
    bare = [found(None, 1.0, True), found(None, 0.5, True)]
    assert best_of(bare) is bare[1]


def test_a_text_is_cut_into_samples_whose_targets_are_one_character_on(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("abcdefghij" * 30, encoding="utf-8")
    data = conf_option("dataset", "text", path=str(path), sequence_length=7).load()
    assert (len(data.train), len(data.test), data.sample_shape, data.num_classes) == (
        38,
        4,
        (7,),
        10,
    )
    inputs, targets = data.train.batch(np.arange(38))
    assert inputs.flatten().tolist() == [place % 10 for place in range(266)]
    assert torch.equal(targets, (inputs + 1) % 10)
    with pytest.raises(UsageError, match="take a shorter one"):
        conf_option("dataset", "text", path=str(path), sequence_length=100).load()
    path.write_bytes(b"\xff" * 300)
    with pytest.raises(DataMissingError, match="no text that can be read"):
        conf_option("dataset", "text", path=str(path)).load()


def test_a_decoder_learns_a_text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("to be or not to be, " * 100, encoding="utf-8")
    small = (
        "model.width=16",
        "model.layers=1",
        f"dataset.path={path}",
        "dataset.sequence_length=16",
        "dataset.batch_size=8",
    )
    adamw = "optimizer=adamw", "optimizer.lr=0.01"
    ran = simulated("dataset=text", *small, *adamw, "sync=bsp", "stop.steps=60")
    found = ran.learner.evaluate(ran.params)
    assert (found["test_accuracy"], found["test_metric"] < 4) == (None, True)  # of 8 characters


def test_a_metric_has_a_name_of_its_own_in_the_records():
    names = {
        "mae": "mae",
        "": "",
        "accuracy": "accuracy",
        "loss": "loss_metric",
        "Acc": "Acc_metric",
        "best": "best_metric",
        "waiting": "waiting_metric",
    }
    names |= {
        "acc@5(top)": "acc_5_top_",
        "../x": "_x",
        "...": "metric",
        "F1 score": "F1 score",
        "größe": "gr__e",
    }
    assert {name: recorded_name(name) for name in names} == names
    titles = {title.lower() for title in (*RARE, *USUAL)}
    assert {title for title in titles if "/" not in title} <= TAKEN_NAMES  # "/" is replaced
    assert renaming_note("mae") == ()
    assert renaming_note("loss") == (
        "the metric 'loss' is recorded as 'loss_metric', as test/loss_metric",
    )
