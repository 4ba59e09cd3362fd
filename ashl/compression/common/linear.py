"""Payloads of linear codecs: an all-reduce sums their float32 values, all other fields being equal.

Source: sums of masked updates as in Konečný et al., "Federated Learning: Strategies for Improving
Communication Efficiency", 2016.
"""

from torch import Tensor, float32, uint8

from ashl.compression.contract import Linear
from ashl.compression.wire.payload_format import HEADER, header_of


class SummedValues(Linear):
    """Linear codec with common indices: payloads of one round differ in their values only."""

    def summand(self, payload: Tensor) -> Tensor:
        """Return the values of a payload, float32."""
        return payload[_values(payload)].view(float32)

    def summed(self, payload: Tensor, total: Tensor) -> Tensor:
        """Return a copy of the payload with these values."""
        whole = payload.clone()
        whole[_values(payload)] = total.to(float32).contiguous().view(uint8)
        return whole


def _values(payload: Tensor) -> slice:
    *_, scale_bytes, value_bytes = header_of(payload)
    return slice(HEADER.size + scale_bytes, HEADER.size + scale_bytes + value_bytes)
