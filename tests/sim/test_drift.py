"""Workers turn slower in the middle of SHL, and one fails: the online planner plans for the others."""

from tests.support import planned, simulated

BASE = (
    "sync=shl",
    "schedule=single",
    "schedule.h_preset=[2]",
    "runtime.gradients=false",
    "cluster=homogeneous",
    "cluster.exchange_s=0.02",
)


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
