"""Codecs on a CUDA device: the same bytes as in the host's memory, and what is decoded is on the
device.
"""

import pytest
import torch

from ashl.compression.contract import EncodeContext
from ashl.stage.compression_pipeline import CodecState, CompressionPipeline
from tests.laws.codecs import ROWS, bits, every_codec
from tests.laws.test_codecs_device import KINDS, LAST_BIT, of_kind

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@every_codec
@pytest.mark.parametrize("d", [1, 1000, 70_001, 300_000])
def test_the_same_bytes(name: str, d: int) -> None:
    for kind in KINDS if not ROWS[name].on_host else ("normal",):
        x, context = of_kind(kind, d), EncodeContext(ratio=0.1, seed=3)
        here, there = (
            CompressionPipeline(ROWS[name], d),
            CompressionPipeline(ROWS[name], d, device="cuda"),
        )
        body, same = (
            here.encode(CodecState(), x, context),
            there.encode(CodecState(), x.cuda(), context),
        )
        assert same.is_cuda != ROWS[name].on_host
        alike = (
            name not in LAST_BIT and kind != "nan"
        )  # of what is no number the bits are a device's own
        if not here.traits.reduces:
            found, expected = (
                there.decode(CodecState(), 0, body).cpu(),
                here.decode(CodecState(), 0, body),
            )
            alike = alike and not expected.isnan().any()
            assert torch.equal(found.isnan(), expected.isnan())
            assert torch.equal(found.nan_to_num(), expected.nan_to_num()), kind
            assert there.decode(CodecState(), 0, same).is_cuda
        if alike:
            assert bits(same.cpu()) == bits(body), kind
