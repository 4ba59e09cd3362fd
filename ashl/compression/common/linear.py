"""Bodies whose float32 values may be summed, all else being alike: what an all-reduce needs of a
linear codec.

Source: sums of masked updates as in Konečný et al., "Federated Learning: Strategies for Improving
Communication Efficiency", 2016.
"""

from torch import Tensor, float32, uint8

from ashl.compression.contract import Linear
from ashl.compression.wire.payload_format import HEADER, header_of


class SummedValues(Linear):
    """All workers have drawn the same places, so that only the values differ."""

    def summand(self, payload: Tensor) -> Tensor:
        """The values of a body, float32."""
        return payload[_values(payload)].view(float32)

    def summed(self, payload: Tensor, total: Tensor) -> Tensor:
        """A body like this one, with these values."""
        whole = payload.clone()
        whole[_values(payload)] = total.to(float32).contiguous().view(uint8)
        return whole


def _values(payload: Tensor) -> slice:
    *_, scale_bytes, value_bytes = header_of(payload)
    return slice(HEADER.size + scale_bytes, HEADER.size + scale_bytes + value_bytes)
