"""A rank's watchdog: when it ends its process, with which message, and that time in which the
process was stopped does not count.
"""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from ashl.run import membership_listener
from ashl.run.membership_listener import Watchdog
from ashl.runtime.records import End

END = End(1, "the job's store at host:29500 did not answer for 6 s (runtime.heartbeat_timeout_s)")


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """The host's clock, which the test sets."""
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(membership_listener.time, "monotonic", lambda: clock.now_s)
    return clock


@pytest.fixture
def watchdog(clock, monkeypatch) -> Iterator[Watchdog]:
    """One that checks when it is told to."""
    monkeypatch.setattr(membership_listener, "TICK_S", 1000.0)
    made = Watchdog(6.0, "host:29500", 1)
    yield made
    made.stop()


def check_for(watchdog: Watchdog, clock: SimpleNamespace, seconds: float) -> End | None:
    """Return the result of the last check, with five checks a second."""
    end = None
    for _ in range(round(5 * seconds)):
        clock.now_s += 0.2
        end = watchdog.check()
    return end


def test_a_silent_store_ends_the_process(watchdog, clock) -> None:
    assert check_for(watchdog, clock, 5.0) is None
    watchdog.record_answer()
    assert check_for(watchdog, clock, 5.8) is None
    assert check_for(watchdog, clock, 0.4) == END


def test_answers_are_enough(watchdog, clock) -> None:
    for _ in range(20):
        watchdog.record_answer()
        assert check_for(watchdog, clock, 5) is None


def test_time_in_which_the_process_was_stopped_does_not_count(watchdog, clock) -> None:
    clock.now_s += 3600.0
    assert watchdog.check() is None
    assert check_for(watchdog, clock, 5) is None
