"""The codecs on CUDA tensors: the same bytes as on the host, and what is added to stays on the device."""

from typing import Any

import pytest
import torch

from ashl.compression.contract import Turn
from tests.laws.codecs import ROWS, bits, every_codec, vector

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]


@every_codec
@pytest.mark.parametrize("d", [1, 1000, 70_001])
def test_the_same_payload(name: str, d: int) -> None:
    codec: Any = ROWS[name]
    x, turn = vector("normal", d), Turn(ratio=0.1, seed=3)
    _, body = codec.encode(None, x, turn)
    _, there = codec.encode(None, x.cuda(), turn)
    assert bits(there.cpu()) == bits(body)
    out, expected = torch.ones(d, device="cuda"), torch.ones(d)
    codec.add(out, there)
    codec.add(expected, body)
    assert out.device.type == "cuda"
    assert torch.allclose(out.cpu(), expected)
