"""Cost of a message as latency plus seconds per byte, fitted to times of messages of several sizes.

Rule: the time of a size is the lower quartile of its measurements, because other load on the
machine only adds time. β is the median slope between messages of at least a megabyte. Smaller
messages fit into the buffers of a link and do not show its rate. The latency α is the median
remainder of the smaller messages. Neither is below zero.

Source: Theil, "A rank-invariant method of linear and polynomial regression analysis", 1950; α and β
as in Shi, Chu and Li, "MG-WFBP", INFOCOM 2019.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import ClassVar

from ashl.plan.checks import FILE, Seconds

SMALL = (2**10, 2**12, 2**14)  # bytes of the messages that are timed
LARGE = (2**20, 2**21, 2**22, 2**23)


@dataclass(frozen=True)
class AlphaBeta:
    """Cost of a link in one direction, or of an all-reduce over all workers."""

    __pydantic_config__: ClassVar = FILE
    latency_s: Seconds
    s_per_byte: Seconds

    def seconds(self, nbytes: float) -> float:
        return self.latency_s + self.s_per_byte * nbytes


def fit_line(times: Mapping[int, Sequence[float]]) -> AlphaBeta:
    """Return the cost line of these times by bytes.

    Args: `times` has at least two sizes of `LARGE` and one smaller size.
    """
    low = {nbytes: sorted(found)[(len(found) - 1) // 4] for nbytes, found in times.items()}
    large = sorted(nbytes for nbytes in low if nbytes >= LARGE[0])
    slopes = [(low[more] - low[less]) / (more - less) for less, more in combinations(large, 2)]
    s_per_byte = max(0.0, median(slopes))
    beyond = [low[nbytes] - s_per_byte * nbytes for nbytes in low if nbytes < LARGE[0]]
    return AlphaBeta(max(0.0, median(beyond)), s_per_byte)
