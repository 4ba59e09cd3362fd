"""A rank's watch: when it ends its process, what it says then, and that it blames nobody for its own sleep."""

from collections.abc import Iterator

import pytest

from ashl.run.watch import Watch
from ashl.runtime.news import End

STORE = End(1, "the job's store at host:29500 did not answer for 6 s (runtime.heartbeat_timeout_s)")
HOME = End(
    1, "nothing was heard of the process that keeps the records, on node-3, for 6 s (runtime.heartbeat_timeout_s)"
)


@pytest.fixture
def watch(monkeypatch) -> Iterator[Watch]:
    """One that looks when it is told to."""
    monkeypatch.setattr("ashl.run.watch.TICK_S", 1000.0)
    made = Watch(6.0, "host:29500", "node-3", 1)
    yield made
    made.over()


def looks(watch: Watch, seconds: float) -> End | None:
    """What it says in the end, looking five times a second."""
    ends = [watch.look(0.2) for _ in range(round(5 * seconds))]
    return ends[-1]


def test_the_store_is_silent_and_with_it_home(watch) -> None:
    watch.heard()
    assert looks(watch, 0.4) is None
    watch.answered()
    assert looks(watch, 5.4) is None
    assert looks(watch, 0.6) == STORE


def test_home_is_silent(watch) -> None:
    for _ in range(29):
        watch.answered()
        assert watch.look(0.2) is None
    watch.answered()
    assert looks(watch, 0.4) == HOME


def test_news_and_answers_are_enough(watch) -> None:
    for _ in range(100):
        watch.answered()
        watch.heard()
        assert looks(watch, 5) is None


def test_a_process_that_was_stopped_has_heard_nothing_by_its_own_fault(watch) -> None:
    assert watch.look(3600.0) is None
    assert looks(watch, 5) is None
