"""Codecs between a CUDA device and the wire: the same bytes as from the host, and what is decoded is on the device."""

import pytest
import torch

from ashl.compression.contract import Turn
from ashl.stage.link import Ends, Link
from tests.laws.codecs import ROWS, bits, every_codec, vector

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]


@every_codec
@pytest.mark.parametrize("d", [1, 1000, 70_001])
def test_the_same_bytes(name: str, d: int) -> None:
    x, turn = vector("normal", d), Turn(ratio=0.1, seed=3)
    here, there = Link(ROWS[name], d), Link(ROWS[name], d, device="cuda")
    body, same = here.encode(Ends(), x, turn), there.encode(Ends(), x.cuda(), turn)
    assert bits(same.cpu()) == bits(body)
    if not here.flags.reduces:
        found = there.decode(Ends(), 0, same)
        assert found.device.type == "cuda"
        assert torch.equal(found.cpu(), here.decode(Ends(), 0, body))
