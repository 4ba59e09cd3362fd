"""The readings of the space shuttle: all of them, normalised, imbalanced, and in skewed shards."""

import numpy as np
import pytest

from ashl.cli.app import main
from ashl.data import shuttle
from ashl.data.partition import make_shards
from tests.conf_option import conf_option


def test_the_classes_are_imbalanced_in_both_halves() -> None:
    pytest.importorskip("river")
    data = conf_option("dataset", "shuttle").load()
    assert (len(data.train), len(data.test)) == (39_278, 9_819)
    assert data.sample_shape == (9,)
    for half in (data.train, data.test):
        assert 0.06 < half.labels.mean() < 0.08
    inputs, _ = data.train.batch(np.arange(len(data.train)))
    assert inputs.mean(0).abs().max() < 1e-3
    assert (inputs.std(0) - 1).abs().max() < 1e-3


def test_shards_by_dirichlet_have_unequal_shares_of_anomalies() -> None:
    pytest.importorskip("river")
    data = conf_option("dataset", "shuttle").load()
    parts = make_shards(data, "dirichlet", [1] * 4, 0.3, 0, [32] * 4)
    shares = [data.train.labels[part].mean() for part in parts]
    assert max(shares) > 3 * min(shares)


def test_missing_river_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shuttle, "find_spec", lambda name: None)
    assert main(["train", "runtime=sim", "dataset=shuttle", "--dry-run"]) == 3
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "pip install 'ashl[river]'" in said
