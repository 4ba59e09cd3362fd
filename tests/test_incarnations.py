"""The books of a worker that was lost and is back: every life's time counts, and what lies between
them is `down`.
"""

from types import SimpleNamespace
from typing import cast

from ashl.runtime.rank_context import Kernel, RankContext
from ashl.runtime.records import Heartbeat, Measured
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
    clock = SimpleNamespace(now_ns=200)
    ctx = RankContext(cast(Kernel, clock), 1)
    account = ctx.time_accounting
    account.set_start(200)
    ctx.add_totals(first)
    account.attribute_until("compute", 280)
    account.record_traffic(210, 1, 2)
    ctx.measure("a", 5.0)
    beat = ctx.heartbeat()
    assert beat.totals_ns == totals(compute=140, wait=30, down=110)
    assert sum(beat.totals_ns.values()) == 280, "the run's time"
    assert (beat.steps, beat.bytes_up, beat.bytes_down, beat.collective_ns) == (5, 11, 22, 4)
    assert beat.measures == {"a": Measured(5.0, 8.0, 3)}
    unheard = RankContext(cast(Kernel, clock), 1)
    unheard.time_accounting.set_start(200)
    unheard.add_totals(None)  # it failed before its first heartbeat
    assert unheard.heartbeat().totals_ns == totals(down=200)


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
