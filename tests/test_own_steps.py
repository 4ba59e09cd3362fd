"""Steps of models and data sets as users write them: what is drawn, and what torch's optimizers
would make of it.
"""

import random

import numpy as np
import pytest
import torch
from conf_option import conf_option, task_of
from torch import nn

from ashl.data.dataset import Data
from ashl.data.plain import split_of
from ashl.device import HOST, claim_generators, generator_states, seed_generators
from ashl.learn.learner import Learner
from ashl.optimizer.absent import has_absent, restore_absent

SOME = np.arange(16)
DRAWS = {
    "torch": torch.rand,
    "numpy": lambda count: torch.tensor(np.random.normal(size=count), dtype=torch.float32),
    "random": lambda count: torch.tensor([random.gauss(0, 1) for _ in range(count)]),
}


class Noisy(nn.Module):
    """Adds noise to its inputs, from its n-th step in training on, or always; and writes down what
    it drew.
    """

    def __init__(self, draw, after=0, always=False):
        super().__init__()
        self.layer, self.draw, self.after, self.always = nn.Linear(4, 3), draw, after, always
        self.steps, self.drawn = 0, []

    def forward(self, x):
        self.steps += self.training
        if self.always or (self.training and self.steps > self.after):
            self.drawn.append(self.draw(4))
            x = x + self.drawn[-1]
        return self.layer(x)


class Own:
    """A model option that makes what it is given."""

    def __init__(self, make):
        self.make = make

    def build(self, sample_shape, num_classes):
        return self.make()


class Items:
    """Samples that are moved a little whenever they are read."""

    def __init__(self, draw=lambda count: torch.zeros(count)):
        self.draw = draw

    def __len__(self):
        return 60

    def __getitem__(self, number):
        return torch.arange(4.0).roll(number) + self.draw(4), number % 3


def blobs(draw=lambda count: torch.zeros(count)):
    return Data(split_of(Items(draw), "Items"), split_of(Items(), "Items"), (4,), 3)


def learner_of(make, data):
    return Learner(Own(make), data, task_of(data), seed=0)


@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.parametrize("place", ["every step", "later steps", "reading"])
def test_what_is_drawn_follows_from_seed_worker_and_step(kind: str, place: str) -> None:
    draw = DRAWS[kind]
    after = 3 if place == "later steps" else 0
    make = (lambda: nn.Linear(4, 3)) if place == "reading" else (lambda: Noisy(draw, after))
    data = blobs(draw) if place == "reading" else blobs()
    keys = [(worker, step) for step in range(4) for worker in (0, 1)]

    def gradients(seed: int) -> dict:
        for generator in (torch.manual_seed, np.random.seed, random.seed):
            generator(seed)
        learner = learner_of(make, data)
        params = learner.init()
        before = torch.get_rng_state(), str(np.random.get_state()), random.getstate()
        found = {key: learner.gradient(params, SOME, *key)[1] for key in keys}
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (str(np.random.get_state()), random.getstate()) == before[1:]
        return found

    first, second = gradients(1), gradients(2)
    assert all(torch.equal(first[key], second[key]) for key in keys)
    drawn = [key for key in keys if place != "later steps" or key[1] >= after]
    assert len({tuple(first[key].tolist()) for key in drawn}) == len(drawn)


@pytest.mark.parametrize("kind", DRAWS)
def test_evaluation_draws_the_same_numbers_each_time(kind: str) -> None:
    learner = learner_of(lambda: Noisy(DRAWS[kind], always=True), blobs(DRAWS[kind]))
    params = learner.init()
    first = learner.evaluate(params)
    learner.gradient(params, SOME, 0, 0)
    assert learner.evaluate(params) == first


def test_only_models_of_ashl_that_do_not_draw_are_computed_by_several_threads() -> None:
    digits = conf_option("dataset", "digits").load()
    assert Learner(conf_option("model", "mlp"), digits, task_of(digits), seed=0).threadsafe
    flat = Own(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    assert not Learner(flat, digits, task_of(digits), seed=0).threadsafe


def test_a_single_minus_zero_is_a_gradient() -> None:
    """A tiny product may round to it; a tensor is without a gradient where it is −0.0
    throughout.
    """
    starts, gradient = np.array([0, 3]), torch.tensor([-0.0, 1, -0.0, -0.0, -0.0])
    before, after = torch.zeros(5), torch.ones(5)
    assert has_absent(gradient, starts)
    assert restore_absent(gradient, starts, [before], [after])[0].tolist() == [1, 1, 1, 0, 0]
    assert not has_absent(torch.tensor([1, -0.0, 1, 1, -0.0]), starts)


def test_a_run_restores_the_generators_that_it_claims() -> None:
    """Within, each seeded piece draws the same as without a claim, also around another one."""

    def draw() -> tuple[float, ...]:
        return random.random(), float(np.random.random()), float(torch.rand(()))

    def draw_seeded() -> list[tuple[float, ...]]:
        with seed_generators(3, HOST):
            first = draw()
            with seed_generators(4, HOST):
                inner = draw()
            return [first, inner, draw()]

    random.gauss(0, 1)
    alone, before = draw_seeded(), generator_states()
    with claim_generators(HOST):
        assert [draw_seeded(), draw_seeded()] == [alone, alone]
    assert generator_states() == before
    assert draw_seeded() == alone
