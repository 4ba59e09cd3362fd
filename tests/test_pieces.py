"""A gradient on parameters that arrive during the forward pass is the gradient, for every use of
the parameters.
"""

import itertools

import numpy as np
import pytest
import torch
from conf_option import conf_option, task_of
from torch import nn
from torch.nn import functional

from ashl.learn.learner import Learner
from ashl.learn.pieces import Pieces

DIGITS = conf_option("dataset", "digits").load()


class Hidden(torch.autograd.Function):
    """A product that torch's own functions do not show the weight of."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        with torch._C.DisableTorchFunction():
            return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


class Odd(nn.Module):
    """A weight used twice, one of a module that is never called, and one that is used first and
    listed last.

    Another weight is not used at all, and one is used without its module.
    """

    def __init__(self, hidden):
        super().__init__()
        self.hides = hidden
        self.tied = nn.Linear(64, 64)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.idle = nn.Linear(3, 2)
        self.head = nn.Linear(64, 10)
        self.gain = nn.Parameter(torch.full((64,), 1.5))
        if hidden:
            self.secret = nn.Parameter(torch.full((64,), 0.5))

    def forward(self, x):
        x = self.tied(x.flatten(1) * self.gain)
        rows = x.view(-1, 4, 16)
        x = x + self.attention(rows, rows, rows, need_weights=False)[0].flatten(1)
        x = functional.linear(functional.dropout(x.relu(), 0.2, self.training), self.tied.weight)
        return self.head(Hidden.apply(x, self.secret) if self.hides else x)


class Made:
    def __init__(self, make):
        self.make = make

    def build(self, sample_shape, num_classes):
        return self.make()


def by_tensor(learner):
    sizes = [int(np.prod(shape)) for _, shape in learner.layers]
    bounds = [0, *np.cumsum(sizes).tolist()]
    return list(itertools.pairwise(bounds))


def in_pieces(learner, params, slices, step=0):
    """(loss, gradient, the order in which pieces were asked for)."""
    came, asked = {}, []

    def take(k):
        asked.append(k)
        return params[slice(*slices[k])]

    stale = torch.full_like(params, 7.0)
    learner._here.set_parameters(stale)
    backwards = slices[::-1]
    loss = learner.gradient_in_parts(
        Pieces(slices, take), np.arange(16), 0, step, backwards, came.__setitem__
    )
    return loss, torch.cat([came[k] for k in reversed(range(len(came)))]), asked


@pytest.mark.parametrize("model", [Odd, "mlp", "cnn", "linear"])
@pytest.mark.parametrize("short", [True, False])
def test_the_gradient_bit_for_bit(model, short, monkeypatch):
    """Where parameters are copied in, and where they are pointed at what has come."""
    if not short:
        monkeypatch.setattr("ashl.learn.replica.SHORT", 0)
    option = (
        conf_option("model", model) if isinstance(model, str) else Made(lambda: Odd(hidden=False))
    )
    learner = Learner(option, DIGITS, task_of(DIGITS), seed=0)
    params = learner.init()
    for step in range(2):
        loss, gradient, asked = in_pieces(learner, params, by_tensor(learner), step)
        expected, whole = learner.gradient(params, np.arange(16), 0, step)
        assert (loss, sorted(asked)) == (expected, list(range(len(learner.layers))))
        assert torch.equal(gradient, whole)


def test_a_piece_is_waited_for_when_it_is_used_first():
    learner = Learner(conf_option("model", "cnn"), DIGITS, task_of(DIGITS), seed=0)
    slices = by_tensor(learner)
    assert in_pieces(learner, learner.init(), slices)[2] == list(range(len(slices)))


def test_what_is_used_in_hiding_is_there_before_forward_begins():
    """The first step detects it and repeats its forward pass."""
    learner = Learner(Made(lambda: Odd(hidden=True)), DIGITS, task_of(DIGITS), seed=0)
    params, slices = learner.init(), by_tensor(learner)
    names = [name for name, _ in learner.layers]
    hidden = [names.index(name) for name in ("idle.weight", "idle.bias", "secret")]
    for step in range(3):
        loss, gradient, asked = in_pieces(learner, params, slices, step)
        expected, whole = learner.gradient(params, np.arange(16), 0, step)
        assert loss == expected
        assert torch.equal(gradient, whole)
        if step:
            assert asked[:3] == sorted(hidden)
