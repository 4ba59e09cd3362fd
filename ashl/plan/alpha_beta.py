"""What a message costs: a latency and seconds per byte, fitted to times of messages of several
sizes.

Rule: of each size the lower quartile counts, since whatever else a machine does only adds. β is the
median slope between messages of a megabyte and more: smaller ones pass through the buffers of a
link whatever its rate. a is the median of what smaller ones take beyond β. Neither is below zero.

Source: Theil, "A rank-invariant method of linear and polynomial regression analysis", 1950; a and β
as Shi, Chu and Li, "MG-WFBP", INFOCOM 2019.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

SMALL = (2**10, 2**12, 2**14)  # bytes of what is timed
LARGE = (2**20, 2**21, 2**22, 2**23)


@dataclass(frozen=True)
class AlphaBeta:
    """Of a link one way, or of a sum over all workers."""

    latency_s: float
    s_per_byte: float

    def seconds(self, nbytes: float) -> float:
        return self.latency_s + self.s_per_byte * nbytes


def fit_line(times: Mapping[int, Sequence[float]]) -> AlphaBeta:
    """The line of these times by bytes, of which at least two sizes are large and one is small."""
    low = {nbytes: sorted(found)[(len(found) - 1) // 4] for nbytes, found in times.items()}
    large = sorted(nbytes for nbytes in low if nbytes >= LARGE[0])
    slopes = [(low[more] - low[less]) / (more - less) for less, more in combinations(large, 2)]
    s_per_byte = max(0.0, median(slopes))
    beyond = [low[nbytes] - s_per_byte * nbytes for nbytes in low if nbytes < LARGE[0]]
    return AlphaBeta(max(0.0, median(beyond)), s_per_byte)
