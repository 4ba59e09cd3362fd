"""DeAR: the sum of each layer group in two halves, one under the backward pass and one under the next forward pass.

Rule: as backward comes to a group, its gradient is reduce-scattered; once all have been, the sums are all-gathered in
the order in which forward needs them, and the forward pass waits for each group by itself. A half costs half a sum, so
in the long run a step takes max_k (R_k + S_k / 2) + max_k (S_k / 2 + q_k), with q_k the forward time from k on and S_k
what the sums of the layers up to k take. What a message holds is for `plan` to say, see `ashl.overlap.crossing`.

Limits: never faster than ideal `priority`; slower than `wfbp` where a large group is ready early and forward is short.
One group is `none`.
Source: Zhang et al., "DeAR: Accelerating Distributed Deep Learning with Fine-Grained All-Reduce Pipelining", ICDCS
2023, tuned there by trial runs. It looks one group ahead; here a gather begins as soon as the one before has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import ClassVar, Literal

from ashl.option import option
from ashl.overlap.chain import Chain
from ashl.overlap.crossing import Crossing
from ashl.overlap.merged import Counts


@option
class DeAR(Crossing):
    """Half of each sum under the backward pass, the other half under the next forward pass."""

    halves: ClassVar[bool] = True
    plan: Literal["layers", "bytes", "tuned"] | Counts

    @property
    def timed(self) -> bool:
        return self.plan == "tuned"

    def step_ns(self, chain: Chain) -> int:
        return took_ns(chain, self.messages(chain), chain.half_ns)

    def whole_ns(self, chain: Chain, messages: tuple[int, ...]) -> int:
        return took_ns(chain, messages, chain.half_ns)

    def planned(self, chain: Chain) -> DeAR:
        return replace(self, plan=self.messages(chain))


def took_ns(chain: Chain, messages: Sequence[int], up_ns: Callable[[int], int]) -> int:
    """How long a step takes in the long run whose messages go up at this cost as they are ready, and come back at that
    of a half once all have gone."""
    ends, now = list(accumulate(messages)), 0
    sizes = [sum(chain.nbytes[end - n : end]) for end, n in zip(ends, messages, strict=True)]
    for end, size in zip(ends, sizes, strict=True):
        now = max(now, chain.ready_ns[end - 1]) + up_ns(size)
    done = accumulate((chain.half_ns(size) for size in reversed(sizes)), initial=now)
    return chain.period_ns(list(done)[:0:-1], messages)
