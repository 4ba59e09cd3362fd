"""What becomes of the messages of a round of gossip."""

from collections.abc import Mapping
from typing import Any

from ashl.runtime.effects import Message
from ashl.size_only import SizeOnly
from ashl.topology.gossip import GossipHeader


def numbers_of(message: Message) -> tuple[float, ...]:
    """What the sync rule sent beside the body."""
    return message.meta[len(GossipHeader._fields) :]


def mix(row: Mapping[int, float], rank: int, own: Any, heard: Mapping[int, Message]) -> Any:
    """Σ_j w_ij·x_j in rank order, a new vector: where all rows are equal, so are the results, bit
    for bit.
    """
    if isinstance(own, SizeOnly):
        return own
    total = None
    for j, weight in row.items():
        body = own if j == rank else heard[j].body
        total = body * weight if total is None else total.add_(body, alpha=weight)
    return total
