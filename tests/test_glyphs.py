"""Rendered letters and digits: repeatable, of every class, and learnable."""

import pytest
import torch

from ashl.data import glyphs
from ashl.data.dataset import Data
from ashl.errors import DataMissingError
from tests.conf_option import conf_option


def load(**fields: object) -> Data:
    return conf_option("dataset", "glyphs", **{"num_train": 3000, "num_test": 500, **fields}).load()


def test_samples_depend_on_the_seed_alone() -> None:
    first, again, other = load(), load(), load(seed=1)
    assert torch.equal(
        first.train.inputs[torch.arange(3000)], again.train.inputs[torch.arange(3000)]
    )
    assert not torch.equal(first.train.targets, other.train.targets)
    assert first.sample_shape == (1, 28, 28)
    assert first.train.targets.unique().numel() == first.num_classes == 62


def test_grey_levels_are_normalised_at_the_defaults() -> None:
    inputs, _ = load().train.batch(torch.arange(3000))
    assert abs(float(inputs.mean())) < 0.03
    assert abs(float(inputs.std()) - 1) < 0.05


@pytest.mark.parametrize("side", [8, 40])
def test_images_have_any_size(side: int) -> None:
    inputs, _ = load(side=side, num_train=50).train.batch(torch.arange(50))
    assert inputs.shape == (50, 1, side, side)
    assert abs(float(inputs.mean())) < 0.6


def test_every_character_is_drawn_in_every_font() -> None:
    ink = torch.from_numpy(glyphs.render_all()).flatten(2).sum(2)
    assert ink.shape == (62, len(glyphs.FONTS))
    assert float(ink.min()) > 10


def test_a_linear_model_learns_more_than_chance() -> None:
    data = load(noise=0.05)
    x, y = data.train.batch(torch.arange(3000))
    test_x, test_y = data.test.batch(torch.arange(500))
    targets = torch.nn.functional.one_hot(y, 62).float()
    ridge = x.flatten(1).T @ x.flatten(1) + 300 * torch.eye(784)
    weights = torch.linalg.solve(ridge, x.flatten(1).T @ targets)
    right = (test_x.flatten(1) @ weights).argmax(1) == test_y
    assert 0.08 < float(right.float().mean()) < 0.9


def test_missing_fonts_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(glyphs, "find_spec", lambda name: None)
    glyphs.render_all.cache_clear()
    with pytest.raises(DataMissingError, match="pip install matplotlib"):
        load()
    glyphs.render_all.cache_clear()
