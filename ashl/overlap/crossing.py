"""What crosses the barrier: sums go on under the next forward pass, which waits for each message by itself.

Messages are runs of layer groups, and the forward pass waits before the first layer of each. By `plan`:
    layers   a message for each group
    bytes    messages of 25 MiB, as DeAR was released
    tuned    as the costs say: of messages by size, and of those that are best with a barrier, the best without one
    [2, 3]   as given: how many groups each message holds, the last layers first

Source: Zhang et al., "DeAR", ICDCS 2023 (messages by size, tuned).
"""

from __future__ import annotations

from typing import ClassVar

from ashl.overlap.chain import Chain
from ashl.overlap.contract import Overlap
from ashl.overlap.merged import CAPS, as_given, by_bytes, optimal


class Crossing(Overlap, contract=True):
    """Sums that may go on under the next forward pass."""

    crosses: ClassVar[bool] = True
    plan: ClassVar[tuple[int, ...] | str] = "layers"

    def messages(self, chain: Chain) -> tuple[int, ...]:
        if not isinstance(self.plan, str):
            return as_given(self.plan, len(chain.ready_ns))
        if self.plan == "bytes":
            return by_bytes(chain, (CAPS[1], CAPS[1]))
        return min(plans(chain), key=lambda plan: self.whole_ns(chain, plan)) if self.plan == "tuned" else each(chain)

    def whole_ns(self, chain: Chain, messages: tuple[int, ...]) -> int:
        """How long a step takes in the long run with these messages in one piece each."""
        raise NotImplementedError


def each(chain: Chain) -> tuple[int, ...]:
    """A message for each layer group."""
    return (1,) * len(chain.ready_ns)


def plans(chain: Chain) -> list[tuple[int, ...]]:
    """Those that are tried, the ones of fewest messages first."""
    n = len(chain.nbytes)
    caps = {sum(chain.nbytes[i:j]) for i in range(n) for j in range(i + 1, n + 1)}
    return sorted(
        {each(chain), optimal(chain), *(by_bytes(chain, (cap, cap)) for cap in caps)}, key=lambda p: (len(p), p)
    )
