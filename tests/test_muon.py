"""Muon against torch's, which iterates in bfloat16; what is a matrix and what is not; and that it
learns.
"""

import pytest
import torch

from ashl.optimizer.muon import Muon, orthogonalize
from tests.conf_option import conf_option

SHAPES = (
    ("embed.weight", (6, 4)),
    ("a.weight", (8, 20)),
    ("a.bias", (8,)),
    ("b.weight", (24, 3, 2, 2)),
)
D = sum(torch.Size(shape).numel() for _, shape in SHAPES)


def pieces(flat):
    sizes = [torch.Size(shape).numel() for _, shape in SHAPES]
    return {
        name: part.view(shape)
        for (name, shape), part in zip(SHAPES, flat.split(sizes), strict=True)
    }


def walked(optimizer, count=4):
    """Parameters after some steps along drawn gradients; what was given stays as it was."""
    draw = torch.Generator().manual_seed(0)
    params, moments = torch.randn(D, generator=draw), optimizer.init(D)
    for _ in range(count):
        grad = torch.randn(D, generator=draw)
        given = [tensor.clone() for tensor in (params, grad, *moments)]
        after, moved = optimizer.step(moments, params, grad, 0.02)
        assert all(torch.equal(*pair) for pair in zip((params, grad, *moments), given, strict=True))
        moments, params = after, moved
    return pieces(params)


def test_matrices_are_turned_and_all_else_goes_as_adamw():
    found = walked(conf_option("optimizer", "muon", weight_decay=0.1).for_layers(SHAPES))
    plain = walked(conf_option("optimizer", "adamw", weight_decay=0.1))
    alike = {name for name in found if torch.equal(found[name], plain[name])}
    assert alike == {"embed.weight", "a.bias"}


def test_two_steps_by_hand():
    """M ← μM + G, W ← (1 − ηλ)W − η·0.2·√max(r, c)·O(G + μM)."""
    found = walked(conf_option("optimizer", "muon", weight_decay=0.1).for_layers(SHAPES), 2)
    draw = torch.Generator().manual_seed(0)
    params, first, second = (pieces(torch.randn(D, generator=draw)) for _ in range(3))
    for name, longest in (("a.weight", 20), ("b.weight", 24)):
        w, momentum = params[name].flatten(1), 0
        for grad in (first[name].flatten(1), second[name].flatten(1)):
            momentum = 0.95 * momentum + grad
            turn = orthogonalize(grad + 0.95 * momentum, 5)
            w = w * (1 - 0.02 * 0.1) - 0.02 * 0.2 * longest**0.5 * turn
        torch.testing.assert_close(found[name].flatten(1), w)


@pytest.mark.slow  # torch's own takes seconds to be imported
def test_matrices_go_as_those_of_torch():
    found = walked(conf_option("optimizer", "muon", weight_decay=0.1).for_layers(SHAPES))[
        "a.weight"
    ]
    draw = torch.Generator().manual_seed(0)
    first = pieces(torch.randn(D, generator=draw))["a.weight"].clone()
    theirs = torch.nn.Parameter(first.clone())
    torchs = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        theirs.grad = pieces(torch.randn(D, generator=draw))["a.weight"].clone()
        torchs.step()
    assert torch.dist(found, theirs) < 0.02 * torch.dist(theirs, first)


@pytest.mark.parametrize("shape", [(4, 30), (30, 4), (7, 7)])
def test_singular_values_come_near_one(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalize(x, 8))
    assert float(values.min()) > 0.6
    assert float(values.max()) < 1.3
    assert orthogonalize(x, 5).shape == shape


@pytest.mark.limit("optimizer=muon")
def test_without_layers_it_is_adamw():
    bare = conf_option("optimizer", "muon")
    assert isinstance(bare, Muon)
    x, grad = torch.ones(5), torch.arange(5.0)
    assert torch.equal(bare.step(bare.init(5), x, grad, 0.1)[1], conf_option("optimizer", "adamw").step(
        bare.init(5), x, grad, 0.1)[1])  # fmt: skip
