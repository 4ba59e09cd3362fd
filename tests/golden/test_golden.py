"""The golden set: every run gives the bits, the bytes and the trace on record. `runs.py` says how
to change them.
"""

from pathlib import Path

import pytest

from ashl.config.catalog import catalog
from tests.conformance.test_kernels import real
from tests.golden.facts import (
    GOLDEN,
    arithmetic,
    changes,
    compared,
    counted,
    facts_of,
    recorded,
    write,
)
from tests.golden.runs import RUNS
from tests.run_folders import adds_up

# a tenth of the presets' costs: timing plays no part, and plans are the same
STEP, EXCHANGE = "cluster.step_s=0.002", "cluster.exchange_s=0.001"
SAME = ("params_sha256", "bytes_up", "bytes_down", "steps", "samples")
# rows whose last answer may be partly in flight at the end
IN_PIECES = ("sharded-topk", "server-slices", "server-priority")

UNSAID = {  # what is chosen where a row says nothing, and what schedules put before their stages
    "topology=parameter_server",
    "sync=profiling",
    "sync=one_bit_adam",
    "compression=none",
    "planner=balanced",
    "aggregate=mean",
    "outer=average",
    "optimizer=sgd",
    "overlap=none",
}


def marked(name: str, slow: bool) -> object:
    return pytest.param(name, marks=pytest.mark.slow) if slow else name


@pytest.mark.parametrize("name", [marked(name, row.twin) for name, row in RUNS.items()])
def test_a_run_is_what_it_was(name: str) -> None:
    row, same = RUNS[name], arithmetic() == recorded()["arithmetic"]
    found = changes(
        name,
        *(
            compared(row, facts, same)
            for facts in (recorded()["runs"].get(name, {}), facts_of(row))
        ),
    )
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "name", [marked(n, row.processes == "slow") for n, row in RUNS.items() if row.processes]
)
def test_processes_give_the_same(name: str, tmp_path: Path) -> None:
    if arithmetic() != recorded()["arithmetic"]:
        pytest.skip("this machine's arithmetic differs from the record's")
    own = [*RUNS[name].overrides, STEP]
    if "cluster.exchange_s=null" not in own:
        own.append(EXCHANGE)
    was, summary = recorded()["runs"][name], real(tmp_path / "run", *own)
    same = [key for key in SAME if key != "bytes_down" or name not in IN_PIECES]
    found = changes(
        f"{name} on processes", *({key: facts[key] for key in same} for facts in (was, summary))
    )
    assert not found, "\n".join(found)
    assert summary["status"] == "finished"
    assert adds_up(summary)


def test_the_record_is_of_this_arithmetic() -> None:
    if arithmetic() != recorded()["arithmetic"]:
        pytest.skip(f"this machine's arithmetic differs from the record's: {counted()}")


def test_the_record_is_of_these_runs() -> None:
    assert list(recorded()["runs"]) == sorted(RUNS)


def test_every_mechanism_has_a_row() -> None:
    words = {word for row in RUNS.values() for word in row.line.split()} | UNSAID
    groups = (
        "topology",
        "sync",
        "compression",
        "schedule",
        "planner",
        "aggregate",
        "outer",
        "optimizer",
        "overlap",
    )
    chosen = {f"{group}={option}" for group in groups for option in catalog()[group]}
    assert sorted(chosen - words) == []


@pytest.mark.timeout(900)
def test_rewrite_golden() -> None:
    """No test: what `--rewrite-golden` runs."""
    write(GOLDEN, "runs", {name: facts_of(row) for name, row in RUNS.items()})
