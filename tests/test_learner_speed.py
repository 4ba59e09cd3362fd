"""The learner beside the loop that anyone would write: a table of ratios, printed and never
asserted.

pytest -m slow tests/test_learner_speed.py
"""

import statistics
import time

import pytest
import torch
from conf_option import conf_option, task_of
from torch.nn import functional

from ashl.data.batches import Batches
from ashl.learn.learner import Learner

BATCH, ROUNDS = 32, 7
CASES = [
    ("mlp", "digits", {}, 200),
    ("cnn", "digits", {}, 60),
    ("lenet", "synthetic", {"shape": [1, 28, 28], "num_train": 1000, "num_test": 10}, 25),
    ("lenet", "synthetic", {"num_train": 1000, "num_test": 10}, 20),
    ("resnet8", "synthetic", {"num_train": 1000, "num_test": 10}, 4),
]


def plain_loop(model, data, batches):
    """The customary loop; the same samples in the same order."""
    module = conf_option("model", model).build(data.sample_shape, data.num_classes)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    inputs, targets = data.train.inputs, data.train.targets

    def steps(start, stop):
        for step in range(start, stop):
            index = torch.from_numpy(batches.indices(step))
            optimizer.zero_grad()
            loss = functional.cross_entropy(module(inputs[index]), targets[index])
            loss.backward()
            optimizer.step()
            loss.item()

    return steps


def learner_loop(model, data, batches):
    learner = Learner(conf_option("model", model), data, task_of(data), seed=0)
    optimizer = conf_option("optimizer", "sgd", lr=0.01)
    state = [optimizer.init(learner.num_params), learner.init()]

    def steps(start, stop):
        for step in range(start, stop):
            _, grad = learner.gradient(state[1], batches.indices(step), 0, step)
            state[:] = optimizer.step(*state, grad, 0.01)

    return steps


@pytest.mark.slow
def test_table(capsys):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for model, dataset, fields, count in CASES:
        data = conf_option("dataset", dataset, **fields).load()
        loops = [
            make(model, data, Batches(torch.arange(1000).numpy(), BATCH, 0, 0))
            for make in (plain_loop, learner_loop)
        ]
        seconds = [[], []]
        for turn in range(ROUNDS):  # side by side, so that a noisy machine is unfair to both
            for loop, spent in zip(loops, seconds, strict=True):
                start = time.perf_counter()
                loop(turn * count, (turn + 1) * count)
                spent.append((time.perf_counter() - start) / count)
        plain, ours = (statistics.median(spent) * 1e6 for spent in seconds)
        with capsys.disabled():
            shape = "x".join(map(str, data.sample_shape))
            print(
                f"{model:>8} {shape:>8}: plain {plain:8.0f} us/step, learner {ours:8.0f}, ratio"
                f" {ours / plain:.2f}"
            )
    torch.set_num_threads(threads)
