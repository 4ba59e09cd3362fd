"""Mix the models that a worker received in a round of gossip."""

from collections.abc import Mapping
from typing import Any

from ashl.runtime.effects import Message
from ashl.size_only import SizeOnly
from ashl.topology.gossip import GossipHeader


def numbers_of(message: Message) -> tuple[float, ...]:
    """Return the numbers that the sync mode sent with a model, after the header."""
    return message.meta[len(GossipHeader._fields) :]


def mix(row: Mapping[int, float], rank: int, own: Any, received: Mapping[int, Message]) -> Any:
    """Return Σ_j w_ij·x_j, summed in rank order into a new vector.

    If all rows are equal, so are the results on all ranks, bit for bit.
    """
    if isinstance(own, SizeOnly):
        return own
    total = None
    for j, weight in row.items():
        body = own if j == rank else received[j].body
        total = body * weight if total is None else total.add_(body, alpha=weight)
    return total
