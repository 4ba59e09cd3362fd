"""A worker is killed at a random moment: in every mode the run continues or ends in one sentence."""

import random
from pathlib import Path

import pytest

from ashl.config.compose import compose
from ashl.planning.compile_plan import compile_plan
from tests.benchmarks import kills as benchmark
from tests.benchmarks.kills import (
    ENDS,
    MOMENTS,
    ON,
    OVER,
    Kill,
    Outcome,
    each_moment,
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


def test_each_moment_of_each_mode_is_resumed(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill with a recorded outcome is not tried again; one with a truncated line is."""
    tried = list[str]()

    def tries(kill: Kill, folder: str) -> Outcome:
        tried.append(kill.moment)
        return Outcome(ENDS, 1.5, "why") if kill.moment == "push" else Outcome(ON, 2.0)

    monkeypatch.setattr(benchmark, "modes", lambda _: [("gossip", "d_psgd", "plan.json")])
    monkeypatch.setattr(
        benchmark, "kills", lambda mode, rng: [Kill(*mode, each, 0, 1.0) for each in MOMENTS]
    )
    monkeypatch.setattr(benchmark, "on_processes", tries)
    table = each_moment(["gossip"], None, 3)
    assert (
        "| `gossip` | `d_psgd` | goes on | ends (within 1.5 s) | goes on | goes on | goes on |"
        in table
    )
    assert table.endswith("goes on: 4, ends: 1")
    text = Path("outcomes.jsonl").read_text()
    Path("outcomes.jsonl").write_text(text[:-9])
    assert each_moment(["gossip"], None, 3) == table
    assert tried == [*MOMENTS, MOMENTS[-1]]


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
