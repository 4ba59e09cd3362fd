"""The books of a worker that was lost and is back: every life's time counts, and what lies between
them is `down`.
"""

from typing import cast

from ashl.run.supervisor import add_prior_totals, outage_until
from ashl.runtime.rank_context import Kernel, RankContext
from ashl.runtime.records import Heartbeat, Measured, StageBoundary, TimeTotals
from ashl.runtime.time_accounting import KINDS


def totals(**known: int) -> dict[str, int]:
    return dict.fromkeys(KINDS, 0) | known


def test_the_times_of_all_lives_add_up() -> None:
    first = Heartbeat(
        1,
        90,
        5,
        0,
        0.5,
        totals(compute=60, wait=30),
        10,
        20,
        {"a": Measured(1.0, 3.0, 2)},
        collective_ns=4,
    )
    before = outage_until(first, 200)
    assert before.totals_ns == totals(compute=60, wait=30, down=110)
    last = TimeTotals(
        1,
        totals(compute=80, push=20),
        1,
        2,
        {"a": Measured(5.0, 5.0, 1), "b": Measured(7.0, 7.0, 1)},
    )
    said = add_prior_totals(before, last)
    assert isinstance(said, TimeTotals)
    assert said.totals_ns == totals(compute=140, wait=30, push=20, down=110)
    assert sum(said.totals_ns.values()) == 300, "the run's time, which ended 100 later"
    assert (said.bytes_up, said.bytes_down, said.collective_ns) == (11, 22, 4)
    assert said.measures == {"a": Measured(5.0, 8.0, 3), "b": Measured(7.0, 7.0, 1)}
    assert add_prior_totals(before, StageBoundary(1, 0, totals(wait=1))).totals_ns["wait"] == 31
    beat = add_prior_totals(before, first._replace(time_ns=250, steps=2))
    assert isinstance(beat, Heartbeat)
    assert (beat.steps, beat.time_ns) == (7, 250)


def test_a_beat_never_tells_of_more_than_it_is_late() -> None:
    """Another thread goes on with the books meanwhile; what is missing until the worker is back
    would be too short.
    """

    class Busy:
        now = 0

        @property
        def now_ns(self) -> int:
            self.now += 10
            ctx.time_accounting.attribute_until("compute", self.now)
            return self.now - 10

    ctx = RankContext(cast(Kernel, Busy()), 0)
    for _ in range(2):
        beat = ctx.heartbeat()
        assert (
            sum(beat.totals_ns.values())
            == beat.time_ns
            < sum(ctx.time_accounting.current_totals().values())
        )
