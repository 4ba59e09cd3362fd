"""A rank's watch: when it ends its process, what it says then, and that it blames nobody for its
own sleep.
"""

from collections.abc import Iterator

import pytest

from ashl.run.membership_listener import Watchdog
from ashl.runtime.control_messages import End

STORE = End(1, "the job's store at host:29500 did not answer for 6 s (runtime.heartbeat_timeout_s)")
HOME = End(1, "no heartbeat from the controller, on node-3, for 6 s (runtime.heartbeat_timeout_s)")


@pytest.fixture
def watchdog(monkeypatch) -> Iterator[Watchdog]:
    """One that looks when it is told to."""
    monkeypatch.setattr("ashl.run.membership_listener.TICK_S", 1000.0)
    made = Watchdog(6.0, "host:29500", "node-3", 1)
    yield made
    made.stop()


def looks(watchdog: Watchdog, seconds: float) -> End | None:
    """Return its last message, with five checks a second."""
    ends = [watchdog.check_timeouts(0.2) for _ in range(round(5 * seconds))]
    return ends[-1]


def test_the_store_and_the_controller_send_nothing(watchdog) -> None:
    watchdog.record_controller_message()
    assert looks(watchdog, 0.4) is None
    watchdog.record_store_answer()
    assert looks(watchdog, 5.4) is None
    assert looks(watchdog, 0.6) == STORE


def test_the_controller_sends_no_heartbeat(watchdog) -> None:
    for _ in range(29):
        watchdog.record_store_answer()
        assert watchdog.check_timeouts(0.2) is None
    watchdog.record_store_answer()
    assert looks(watchdog, 0.4) == HOME


def test_news_and_answers_are_enough(watchdog) -> None:
    for _ in range(100):
        watchdog.record_store_answer()
        watchdog.record_controller_message()
        assert looks(watchdog, 5) is None


def test_a_process_that_was_stopped_has_heard_nothing_by_its_own_fault(watchdog) -> None:
    assert watchdog.check_timeouts(3600.0) is None
    assert looks(watchdog, 5) is None
