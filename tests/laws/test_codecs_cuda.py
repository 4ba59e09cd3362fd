"""Codecs on a CUDA device: the same bytes as in the host's memory, and what is decoded is on the
device.
"""

import numpy as np
import pytest
import torch

from ashl.compression.contract import EncodeContext
from ashl.compression.kernels import block_sums, pack, unpack
from ashl.data.counter_rng import CounterRng
from ashl.stage.compression_pipeline import CodecState, CompressionPipeline
from tests.laws.codecs import ROWS, bits, every_codec, vector
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


@pytest.mark.parametrize("width", range(1, 33))
def test_packing(width: int) -> None:
    numbers = np.random.default_rng(width).integers(0, 2 ** min(width, 31), 70_001)
    stream = pack(numbers, width)
    there = pack(torch.from_numpy(numbers).cuda(), width)
    assert torch.equal(there.cpu(), stream)
    assert unpack(there, width, numbers.size).cpu().tolist() == numbers.tolist()


def test_random_words() -> None:
    stream, like = EncodeContext(seed=5).words(), torch.empty(0)
    assert (
        stream.words(like.cuda(), 3, 10**6).cpu().numpy().tobytes()
        == stream.words(like, 3, 10**6).numpy().tobytes()
    )
    assert CounterRng(0).words(torch.empty(0).cuda(), 0, 1).tolist() == [0]


def test_sums() -> None:
    x = vector("heavy", 1_000_003).abs()
    assert block_sums(x.cuda()) == block_sums(x)
