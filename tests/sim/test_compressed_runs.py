"""Compression inside a run: the same sum through a server and by gathering, health, and updates
that are no numbers.
"""

import json
import math
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from ashl.cli.app import main
from ashl.compression.contract import EncodeContext, Layer
from ashl.compression.error_metrics import measure_compression_error, split_bytes
from ashl.compression.payload import Parts
from ashl.compression.random_mask import RandomMask
from ashl.compression.wrappers import wrap_codec
from ashl.learn.learner import Learner
from ashl.run.metrics import WARN_AFTER, CompressionStats
from ashl.runtime import records
from tests.conf_option import conf_option
from tests.laws.codecs import vector
from tests.support import simulated

BASE = (
    "sync=bsp",
    "stop.epochs=2",
    "compression=topk",
    "optimizer.momentum=0",
    "model.hidden=[16]",
)


def test_what_was_looked_at() -> None:
    """Check p = x + e; with Top-K the relative error is the share that was not sent."""
    layout = (Layer("a", (30,)), Layer("b", (70,)))
    codec = conf_option("compression", "topk", ratio=0.1)
    link, x = wrap_codec(codec, layout), vector("normal", 100)
    sender, body = link.encode(None, x)
    found = measure_compression_error([(codec, x.numel(), body)], link.residual(sender), x)
    sent = codec.decode(None, body, 100)[1]
    left = float(((x - sent) ** 2).sum() / (x**2).sum())
    assert found["relative_error"] == pytest.approx(left)
    assert found["residual"] == pytest.approx(left**0.5)
    assert found["cosine"] == pytest.approx((1 - left) ** 0.5)
    assert sum(found["split"]) == found["nbytes"] == body.nbytes
    assert found["split"] == (20, 0, 40, 9)
    layered = wrap_codec(conf_option("compression", "topk", ratio=0.1, per_layer=True), layout)
    _, body = layered.encode(None, x)
    assert split_bytes(body) == (20 + 8 + 40, 0, 40, 2 + 7)


def test_health_is_a_metric(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = (
        "train",
        "-q",
        "runtime=sim",
        "tracking=none",
        "run.dir=out",
        "run.compression_stats_every=5",
    )
    assert main([*command, *BASE]) == 0
    line = json.loads((workplace / "out/metrics.jsonl").read_text().splitlines()[-1])
    assert 0 < line["compress/relative_error"] < 1
    assert 0 < line["compress/cosine"] < 1
    assert line["compress/residual"] > 0
    record = json.loads((workplace / "out/summary.json").read_text())["compression"]
    assert (
        record["bits"]
        == line["compress/bits"]
        == pytest.approx(32 * sum(record["bytes"].values()) / (4 * 1210), rel=0.2)
    )
    assert record["warning"] is None


def test_a_codec_that_enlarges_is_named() -> None:
    health = CompressionStats(dense_bytes=400)
    growing = records.CompressionReport(
        1, 0, 0, 1.4, None, 0.1, (20, 0, 0, 0), nbytes=20, unbiased=False
    )
    for _ in range(WARN_AFTER - 1):
        health.add(growing)
    health.add(growing._replace(relative_error=0.9))
    assert health.warning is None
    for _ in range(WARN_AFTER):
        health.add(growing)
    assert health.warning is not None
    assert "worker 1" in health.warning


@pytest.mark.parametrize("topology", ["parameter_server", "all_reduce"])
def test_an_update_that_is_no_number_names_its_layer(
    topology: str, monkeypatch: pytest.MonkeyPatch, workplace: Path
) -> None:
    gradient = Learner.gradient_found

    def broken(self, params, indices, worker, step, *more, **named):
        loss, grad, absent = gradient(self, params, indices, worker, step, *more, **named)
        if worker == 2 and step == 3:
            grad[-3] = math.nan
        return loss, grad, absent

    monkeypatch.setattr(Learner, "gradient_found", broken)
    assert (
        main(
            [
                "train",
                "-q",
                "runtime=sim",
                "tracking=none",
                "run.dir=out",
                f"topology={topology}",
                *BASE,
            ]
        )
        == 1
    )
    summary = json.loads((workplace / "out/summary.json").read_text())
    assert summary["status"] == "diverged"
    assert "layer 3.bias of the update of worker 2" in summary["exit_reason"]
    assert "round 4" in summary["exit_reason"]


def test_who_computes_on_one_model_shares_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose pushes came too late now and then had another mask than all others
    ever after.
    """
    drawn, masks = RandomMask.pack, defaultdict(set)

    def pack(self: RandomMask, x: np.ndarray, context: EncodeContext) -> Parts:
        parts = drawn(self, x, context)
        assert context.params is not None
        masks[context.params.numpy().tobytes()].add(
            (context.worker, parts.indices.numpy().tobytes())
        )
        return parts

    monkeypatch.setattr(RandomMask, "pack", pack)
    simulated(
        "sync=backup",
        "cluster=one_slow",
        "compression=random_mask",
        "optimizer.momentum=0",
        "stop.steps=60",
    )
    met = [found for found in masks.values() if len({worker for worker, _ in found}) > 1]
    assert len(met) > 5
    assert all(len({mask for _, mask in found}) == 1 for found in met)
