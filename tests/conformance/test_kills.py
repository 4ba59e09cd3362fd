"""A worker is killed at a random moment: in every mode the run continues or ends in one sentence."""

import random
from pathlib import Path

import pytest

from ashl.config.compose import compose
from ashl.planning.compile_plan import compile_plan
from tests.benchmarks.kills import (
    ENDS,
    ON,
    OVER,
    kills,
    modes,
    on_processes,
)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("topology", "every"),
    [("parameter_server", 4), ("all_reduce", 1), ("partial_all_reduce", 1), ("gossip", 2)],
)
def test_no_kill_leaves_anything_undone(topology: str, every: int, workplace: Path) -> None:
    rng = random.Random(1)
    drawn = [kill for mode in [*modes([topology])][::every] for kill in kills(mode, rng)]
    for number, kill in enumerate(rng.choices(drawn, k=6)):
        found = on_processes(kill, f"run-{number}")
        assert found.what in (ON, OVER, ENDS), (kill, found)


def test_a_plan_from_a_file_is_predicted_without_its_faults(workplace: Path) -> None:
    own = [
        "runtime=sim",
        "topology=all_reduce",
        "sync=bsp",
        "model.hidden=[8]",
        "cluster.compute=[1,2]",
    ]
    plan = compile_plan(compose(own, None), None, own)
    Path("plan.json").write_text(plan.to_json())
    events = "cluster.events=[{time_s: 1.0, worker: 1, fail: true}]"
    again = compile_plan(compose([*own, "plan=plan.json", events], None), None, own)
    assert again.stages[0].predicted_steps_per_s == plan.stages[0].predicted_steps_per_s
