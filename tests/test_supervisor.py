"""The cause of a failed real run, as the controller finds it: errors of ranks, ended processes,
missing heartbeats.
"""

import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ashl.config.signals import describe_exit
from ashl.errors import AshlError
from ashl.run.control_channel import PATIENCE_S
from ashl.run.launch import rank_processes
from ashl.run.process_setup import EXIT_EVICTED
from ashl.run.rank import RankSettings, is_consequence, role_name
from ashl.run.supervisor import LivenessMonitor, check_liveness, find_culprit
from ashl.runtime.effects import PeerFailedError
from ashl.runtime.records import (
    ControlUpdate,
    End,
    Heartbeat,
    RankError,
    WorkerFailed,
    WorkerRejoined,
)
from ashl.runtime.time_accounting import KINDS
from tests.support import planned

BUG = RankError(2, "ValueError: no", consequence=False)
KILLED = {3: "was killed by SIGKILL"}
VANISHED = " disconnected: its connections were closed, and no heartbeat followed"


def lost(rank: int) -> RankError:
    return RankError(rank, "Connection closed by peer", consequence=True)


@pytest.mark.parametrize(
    ("errors", "gone", "silent", "who", "what"),
    [
        ([lost(0), BUG], {}, [2], 2, ": ValueError: no"),  # the first to complain is not the cause
        ([BUG], KILLED, [3], 2, ": ValueError: no"),
        ([lost(0), lost(1)], KILLED, [], 3, " was killed by SIGKILL"),
        # a rank that has reported its error may end, or send no heartbeats
        ([lost(3)], {3: "ended with exit code 1"}, [1], 1, VANISHED),
        ([lost(0), lost(1)], {}, [0, 2], 2, VANISHED),
        # the link between two that live
        ([lost(0), lost(1)], {}, [], 0, ": Connection closed by peer"),
    ],
)
def test_the_culprit(errors, gone, silent, who, what) -> None:
    assert find_culprit(errors, gone, silent) == (who, what)


def test_an_error_may_be_the_consequence_of_another_failure() -> None:
    assert is_consequence(PeerFailedError(4, "Connection reset by peer"))
    assert is_consequence(RuntimeError("[pair.cc:534] Connection closed by peer [10.0.0.1]:4711"))
    assert not is_consequence(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    wrapped = ValueError("an option of your own failed")
    wrapped.__cause__ = PeerFailedError(1)
    assert is_consequence(wrapped)


def test_how_a_process_has_ended() -> None:
    assert describe_exit(-9) == "was killed by SIGKILL"
    assert describe_exit(-40) == "was killed by signal 40"  # it has no name
    assert describe_exit(3) == "ended with exit code 3"


def liveness_monitor(**known: Any) -> tuple[LivenessMonitor, SimpleNamespace, list[Any]]:
    """A supervisor of two workers and a server, with a monitor that records its calls."""
    emitted: list[Any] = []
    monitor = SimpleNamespace(emit=emitted.append, heartbeats={})
    channel = SimpleNamespace(
        incarnations=dict.fromkeys(range(3), 0),
        last_heard_s=dict.fromkeys(range(3), 0.0),
        awake_s=0.0,
        silent_s=lambda rank: 0.0,
        is_closed=lambda rank: False,
        control_update=ControlUpdate(),
    )
    stages = planned("topology=parameter_server").stages
    limits = {"heartbeat_timeout_s": 90.0, "wait_timeout_s": 5.0}
    plan = SimpleNamespace(num_workers=2, num_ranks=3, lead_rank=2, stages=stages, runtime=limits)
    return (
        LivenessMonitor(plan, monitor, channel, {}, {}, lambda *_: None, None, True, **known),
        monitor,
        emitted,
    )


def empty_totals(rank: int) -> Heartbeat:
    return Heartbeat(rank, 0, 0, None, None, dict.fromkeys(KINDS, 0), 0, 0, {})


def test_the_next_incarnation_gets_the_totals_of_the_worker() -> None:
    """Also of a heartbeat that arrived after its end."""
    started: list[Any] = []
    liveness, monitor, _ = liveness_monitor()
    liveness.start = started.append
    liveness.rank_settings = {1: RankSettings(1)}
    liveness.processes[1] = SimpleNamespace(exitcode=-9)
    liveness.continue_without(1, "was killed by SIGKILL")
    monitor.heartbeats[1] = empty_totals(1)._replace(time_ns=5, steps=7)
    liveness.restart_workers(1)
    assert started == [RankSettings(1, incarnation=1, totals=monitor.heartbeats[1])]


def test_a_worker_fails_when_its_last_messages_are_read() -> None:
    """Else it may be lost, by home's clock, before it said them: that is behind by as much as beats
    came late.
    """
    liveness, monitor, emitted = liveness_monitor()
    liveness.processes[1] = SimpleNamespace(exitcode=-9)
    liveness.clock_zero_ns = time.monotonic_ns()
    monitor.heartbeats[1] = empty_totals(1)._replace(steps=7)
    liveness.detect_failures(60.0, [], time.monotonic())
    assert not emitted, "what it had said by then may be unheard"
    liveness.handle_record(said := empty_totals(1)._replace(time_ns=10**15, steps=8), None)
    monitor.heartbeats[1] = said
    liveness.detect_failures(60.0, [], time.monotonic())
    assert [type(record) for record in emitted] == [type(said), WorkerFailed]
    assert emitted[1].time_ns >= 10**15


def test_a_closed_connection_is_the_end_of_a_process_on_another_node() -> None:
    liveness, monitor, emitted = liveness_monitor()
    monitor.heartbeats[1] = empty_totals(1)._replace(steps=7)
    liveness.channel.is_closed = lambda rank: rank == 1
    assert liveness.unexpected_exits() == {1: "disconnected"}
    for _ in range(2):
        liveness.detect_failures(60.0, [], time.monotonic())
    assert [record.why for record in emitted] == ["disconnected"]
    liveness, monitor, emitted = liveness_monitor(errors=[RankError(1, "a bug", False)])
    monitor.heartbeats[1] = empty_totals(1)._replace(steps=7)
    liveness.channel.is_closed = lambda rank: rank == 1
    for _ in range(2):
        liveness.detect_failures(60.0, [], time.monotonic())
    assert not emitted, "a worker that fails with an error of its own ends the run"


def test_a_rejoining_worker_that_misses_heartbeats_is_evicted() -> None:
    """Otherwise it would count as rejoined once it reports again, and the run would ignore it."""
    killed = {1: "was killed by SIGKILL"}
    liveness, _, emitted = liveness_monitor(failed=killed, rejoining={1: True})
    channel = liveness.channel
    ends: dict[int, End] = {}
    channel.evict, channel.silent_s = ends.__setitem__, lambda rank: 4.5
    channel.incarnations[1] = 1
    liveness.abandon_silent_rejoins(5.0)
    assert (ends, liveness.rejoining) == ({}, {1: True})
    liveness.abandon_silent_rejoins(4.0)
    sentence = "worker 1 sent no heartbeat for 4 s (runtime.heartbeat_timeout_s); the run continues"
    assert ends == {1: End(EXIT_EVICTED, f"{sentence} without it")}
    assert not liveness.rejoining
    assert channel.control_update.failed == ((1, 1),)
    liveness.handle_record(WorkerRejoined(1, 5), None)
    assert (emitted, [*liveness.failed]) == ([], [1]), "it reported this before it hung"


def test_the_run_ends_when_its_last_worker_stays_silent() -> None:
    """Also where the controller started none of the remaining processes, and its node is not cut
    off.
    """
    liveness, monitor, _ = liveness_monitor(failed={0: "disconnected"})
    monitor.hosts = {rank: SimpleNamespace(host=f"node{rank}") for rank in range(3)}
    silent_s = {0: 0.0, 1: 3.0, 2: 3.0}
    liveness.channel.silent_s = silent_s.__getitem__
    liveness.channel.awake = SimpleNamespace(resumed_s=0.0)
    liveness.detect_failures(2.0, [1, 2], time.monotonic())
    # an overloaded node: the run cannot do without it, and waits
    check_liveness(liveness, 2.0, [1, 2])
    silent_s[1] = silent_s[2] = 10.5
    with pytest.raises(
        AshlError, match=r"worker 1 on node1, .* sent no heartbeat for 10 s; the run"
    ):
        check_liveness(liveness, 2.0, [1, 2])


def test_a_worker_that_becomes_silent_within_a_pass_does_not_end_the_run() -> None:
    """The next pass evicts it."""
    liveness, monitor, emitted = liveness_monitor()
    monitor.job = SimpleNamespace(parts=SimpleNamespace(stages=()))
    monitor.heartbeats = {rank: empty_totals(rank)._replace(steps=7) for rank in range(3)}
    monitor.hosts = {}
    liveness.channel.awake = SimpleNamespace(resumed_s=0.0)
    liveness.channel.evict = lambda *_: None
    silent_s = {0: 0.0, 1: 19.99, 2: 0.0}
    liveness.channel.silent_s = silent_s.__getitem__
    for why in ([], ["sent no heartbeat for 20 s"]):
        silent = liveness.silent_ranks(20.0)
        liveness.detect_failures(20.0, silent, time.monotonic())
        silent_s[1] = 20.01
        check_liveness(liveness, 20.0, silent)
        assert [record.why for record in emitted] == why


def test_ranks_that_wait_for_each_other_are_judged_by_the_limit_of_waiting() -> None:
    liveness, monitor, _ = liveness_monitor()
    monitor.hosts = {}
    liveness.channel.awake = SimpleNamespace(resumed_s=0.0)
    liveness.channel.awake_s = 60.0
    for idle_s, hangs in ((4.0, False), (6.0, True)):
        monitor.heartbeats = {
            rank: empty_totals(rank)._replace(waiting="waits for 'pull'", idle_s=idle_s)
            for rank in range(3)
        }
        with (
            pytest.raises(AshlError, match="deadlock: no rank made progress for 5 s: rank 0 waits")
            if hangs
            else nullcontext()
        ):
            check_liveness(liveness, 0.8, [])


def test_a_process_that_cannot_be_killed_does_not_hold_up_the_end(monkeypatch, caplog) -> None:
    """The ranks on other nodes learn the end of the run after it, and the records are complete."""
    waits: list[float | None] = []
    stuck = SimpleNamespace(
        pid=7,
        is_alive=lambda: True,
        kill=lambda: None,
        join=lambda limit_s=None: waits.append(limit_s),
    )
    monkeypatch.setattr("ashl.run.launch.start_child", lambda *_: stuck)
    plan: Any = SimpleNamespace(to_json=str)
    with rank_processes(plan, [RankSettings(0)], None):  # type: ignore[arg-type]
        pass
    assert waits == [PATIENCE_S]
    assert "process 7 does not end after SIGKILL" in caplog.text


def test_a_failed_server_is_named_as_a_server() -> None:
    for topology, called in (
        ("sharded_server", "the server"),
        ("halos", "the server"),
        ("gossip", "the coordinator"),
    ):
        plan = planned("topology=parameter_server")
        stage = replace(plan.stages[0], topology={"_target_": f"ashl.topology.{topology}.Any"})
        assert role_name(replace(plan, stages=(stage,)), 5) == f"{called} (rank 5)"
