"""Read the records of a watched job, and attribute the time of each rank.

All ranks leave an exchange of gradients at the same time. So the rank that was blocked for the
shortest time arrived last: its time is that of the communication, and what the others were blocked
longer is waiting. No clock is compared between ranks.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ashl.tracking import jsonl

PATTERN = "rank*.jsonl"
Iteration = tuple[int, int]  # the start of the process at its rank, 1 the first; the iteration


class Step(NamedTuple):
    """A recorded step of a rank, which stands for `stride` steps."""

    stride: int
    seconds: float
    blocked_s: float


@dataclass
class RankTimes:
    """Totals of one rank, in seconds."""

    rank: int
    host: str = ""
    device: str = ""
    steps: int = 0
    compute_s: float = 0.0
    communication_s: float = 0.0
    wait_s: float = 0.0


@dataclass
class RecordFile:
    """The records of one rank, read as far as they are written."""

    size: int = 0  # bytes read
    starts: int = 0  # processes of this rank so far


@dataclass
class Records:
    """The records of all ranks of a job, and the totals of their time."""

    folder: Path
    ranks: dict[int, RankTimes] = field(default_factory=dict)
    world_size: int = 0
    files: dict[Path, RecordFile] = field(default_factory=dict)
    # steps that not all ranks have recorded yet
    pending: defaultdict[Iteration, dict[int, Step]] = field(
        default_factory=lambda: defaultdict(dict)
    )

    def read(self) -> None:
        """Read what the ranks have written since the last call."""
        for path in sorted(self.folder.glob(PATTERN)):
            file = self.files.setdefault(path, RecordFile())
            records, file.size = jsonl.tail(path, file.size)
            rank = int(path.stem.removeprefix("rank"))
            for record in records:
                self.add(file, rank, record)
        for iteration in [
            key for key, steps in self.pending.items() if len(steps) == self.world_size
        ]:
            self.attribute(self.pending.pop(iteration))
            self.forget(iteration)

    def add(self, file: RecordFile, rank: int, record: Any) -> None:
        """Add one line of a rank."""
        if isinstance(record, dict):
            file.starts += 1
            self.world_size = record["world_size"]
            times = self.ranks.setdefault(rank, RankTimes(rank))
            times.host, times.device = record["host"], record["device"]
        else:
            number, *step = record
            self.pending[file.starts, number][rank] = Step(*step)

    def attribute(self, steps: dict[int, Step]) -> None:
        """Add a step of all ranks to their totals."""
        stride = max(step.stride for step in steps.values())
        exchange_s = min(step.blocked_s for step in steps.values())
        for rank, step in steps.items():
            times = self.ranks[rank]
            times.steps += stride
            times.compute_s += stride * (step.seconds - step.blocked_s)
            times.communication_s += stride * exchange_s
            times.wait_s += stride * (step.blocked_s - exchange_s)

    def forget(self, latest: Iteration) -> None:
        """Delete earlier steps, which a rank with a larger stride did not record."""
        for iteration in [key for key in self.pending if key < latest]:
            del self.pending[iteration]

    def rows(self) -> list[dict[str, Any]]:
        """Return the totals by rank, in rank order."""
        return [{**vars(times)} for _, times in sorted(self.ranks.items())]

    @property
    def time_s(self) -> float:
        """Return the time of the steps that all ranks have recorded."""
        return max(
            (row["compute_s"] + row["communication_s"] + row["wait_s"] for row in self.rows()),
            default=0.0,
        )
