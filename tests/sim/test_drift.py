"""A worker that turns three times slower in the middle of SHL: what the online planner recovers of
it.
"""

from tests.support import planned, simulated

SLOWER_S, FROM_S, END_S = 10.0, 20.0, 60.0  # when it turns slower, and what is looked at
BASE = (
    "sync=shl",
    "schedule=single",
    "schedule.h_preset=[2]",
    "runtime.gradients=false",
    "cluster=homogeneous",
    "cluster.exchange_s=0.02",
)


def late_rate(*overrides: str) -> tuple[float, int]:
    """Return the steps/s of all workers in the steady state, and the number of replans."""
    event = f"cluster.events=[{{time_s: {SLOWER_S}, worker: 0, compute: 3.0}}]"
    ran = simulated(*BASE, event, f"stop.seconds={END_S}", *overrides)
    steps = sum(
        r["steps"]
        for r in ran.of("Round")
        if FROM_S < r["end_ns"] / 1e9 <= END_S and not r["dropped"]
    )
    assert ran.end["max_lead"] <= 3
    return steps / (END_S - FROM_S), len(ran.of("Replan"))


def test_online_planning_recovers_what_a_static_plan_loses() -> None:
    fresh = (
        planned(*BASE, "planner=balanced", "cluster.compute=[3,1,1,1]")
        .stages[0]
        .predicted_steps_per_s
    )
    static, none = late_rate("planner=paper")
    online, plans = late_rate("planner=online", "planner.h_max=8")
    assert fresh is not None
    assert none == 0
    assert static < 0.6 * fresh, "else the case proves nothing"
    assert online >= 0.8 * fresh
    assert 1 <= plans <= 4, "it settles"


def test_a_replan_is_for_the_survivors() -> None:
    """Worker 0 turns thirty times slower and is lost, then worker 1 turns three times slower."""
    drifts = ["{time_s: 2, worker: 0, compute: 30}", "{time_s: 6, worker: 0, fail: true}"]
    drifts.append("{time_s: 10, worker: 1, compute: 3}")
    events = f"cluster.events=[{', '.join(drifts)}]"
    ran = simulated(*BASE, "planner=online", "planner.h_max=null", "stop.seconds=25", events)
    fresh = planned(*BASE, "planner=balanced", "cluster.compute=[3,1,1]").stages[0].workers
    assert ran.of("Replan")[-1]["local_steps"][1:] == [worker.local_steps for worker in fresh]
    assert len({plan["local_steps"][0] for plan in ran.of("Replan")}) == 1, (
        "who is gone is given nothing new"
    )
