"""Profiles: declared costs, the JSON form, and what is refused."""

import io
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from ashl.errors import UsageError
from ashl.plan.confidence import equalize_costs
from ashl.plan.declared_costs import profile_of_declared_costs
from ashl.plan.profile import SCHEMA, Profile, WorkerProfile
from ashl.planner.assignment import Planner
from ashl.planner.dylu import DyLU
from ashl.tracking.forecast import print_profile
from tests.conf_option import conf_option
from tests.plans import BALANCED, PAPER

WORKER: dict[str, Any] = {
    "step_s": 0.04,
    "step_spread_s": 0.001,
    "step_noise_s": 0.001,
    "push_noise_s": 0.0,
    "push_loaded_s": 0.05,
    "pull_noise_s": 0.0,
    "pull_loaded_s": None,
    "batch": 32,
    "push_s": 0.03,
    "pull_s": 0.02,
    "latency_s": 0.01,
    "push_bytes_s": 2e6,
    "pull_bytes_s": None,
    "compress_s": 0.0,
}


def profile(source: str = "measured", **changes: Any) -> Profile:
    second = WorkerProfile(**{**WORKER, **changes})
    return Profile(
        schema=SCHEMA,
        model="MLP",
        num_params=10_000,
        dense_bytes=40_000,
        device="cpu",
        source=source,
        server_step_s=0.0,
        server_bytes_s=None,
        ports=True,
        workers=(WorkerProfile(**WORKER), second),
    )


def with_entry(key: str, value: Any) -> str:
    data = json.loads(profile().to_json())
    data["workers"][1][key] = value
    return json.dumps(data)


def test_round_trip() -> None:
    assert Profile.from_json(profile(push_s=1 / 3).to_json()) == profile(push_s=1 / 3)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step_s", 0),
        ("step_s", math.nan),
        ("step_s", None),
        ("step_s", 1e300),  # seconds that no clock can bear
        ("pull_s", 10**400),
        ("push_s", 0.0),  # measured: never zero
        ("compress_s", None),
        ("batch", True),
    ],
)
def test_a_cost_that_cannot_be_is_refused_by_name(key: str, value: Any) -> None:
    says = (
        rf"^workers\.1\.{key}=.* is not possible|^worker 1 of the profile: a push or a pull takes"
    )
    with pytest.raises(ValueError, match=says) as caught:
        Profile.from_json(with_entry(key, value))
    assert "\n" not in str(caught.value)


def test_a_declared_cost_may_be_zero() -> None:
    free = profile("declared", push_s=0.0, pull_s=0, push_bytes_s=None)
    assert Profile.from_json(free.to_json()) == free


def test_missing_unknown_and_broken() -> None:
    data = json.loads(profile().to_json())
    for broken, words in [
        (
            {**data, "workers": [{k: v for k, v in WORKER.items() if k != "push_s"}]},
            r"workers\.0\.push_s is missing",
        ),
        (
            {**data, "workers": [{**data["workers"][0], "pushs": 1}]},
            r"workers\.0\.pushs is not a key",
        ),
        ({**data, "workers": []}, "should have at least 1 values"),
        ({k: v for k, v in data.items() if k != "num_params"}, "num_params is missing"),
        ({**data, "schema": 1}, "schema 1 where schema 5 was expected"),
        ({**data, "model": "\x1b[2J"}, "should be printable text"),
        ([], "no mapping of keys"),
    ]:
        with pytest.raises(ValueError, match=words):
            Profile.from_json(json.dumps(broken))
    with pytest.raises(ValueError, match="Expecting"):
        Profile.from_json(profile().to_json()[:-5])
    with pytest.raises(ValueError, match="nested too deep"):
        Profile.from_json("[" * 100_000)


def test_declared_exchange() -> None:
    made = profile_of_declared_costs(
        conf_option("cluster", "ashl_paper", jitter=0.1), "LeNet", 1_000, 128
    )
    assert [w.step_s for w in made.workers] == pytest.approx([0.04, 0.06, 0.08])
    assert [w.step_spread_s for w in made.workers] == pytest.approx([0.004, 0.006, 0.008])
    assert (
        [w.push_s for w in made.workers]
        == [w.pull_s for w in made.workers]
        == pytest.approx([0.04, 0.06, 0.08])
    )
    assert [w.push_of(0.5) for w in made.workers] == pytest.approx([0.02, 0.03, 0.04])
    assert (made.source, made.dense_bytes, made.workers[0].batch) == ("declared", 4_000, 128)
    assert Profile.from_json(made.to_json()) == made


def test_declared_links() -> None:
    """Latency + bytes over the slower of the two ports: 1 MB at 4 Mbit/s takes 2 s, at 1 Mbit/s 8
    s.
    """
    ports = {
        "exchange_s": None,
        "bandwidth_mbit_s": 4.0,
        "latency_s": 0.25,
        "link": [1.0, 1.0, 4.0],
    }
    made = profile_of_declared_costs(
        conf_option("cluster", "ashl_paper", **ports), "LeNet", 250_000, 128
    )
    assert [w.push_s for w in made.workers] == pytest.approx([2.25, 2.25, 9.0])
    assert [w.push_of(0.5) for w in made.workers] == pytest.approx([1.25, 1.25, 5.0])
    behind = profile_of_declared_costs(
        conf_option("cluster", "ashl_paper", **ports, server_bandwidth_mbit_s=2),
        "LeNet",
        250_000,
        128,
    )
    assert [w.push_s for w in behind.workers] == pytest.approx([4.25, 4.25, 9.0])


def test_free_links_cost_nothing_per_byte() -> None:
    first, *_ = profile_of_declared_costs(
        conf_option("cluster", "ashl_paper", exchange_s=0.0), "LeNet", 1_000, 128
    ).workers
    assert (first.push_s, first.push_bytes_s, first.push_of(0.1)) == (0.0, None, 0.0)


@pytest.mark.parametrize("missing", ["step_s", "compress_s", "exchange_s"])
def test_a_missing_cost_is_an_error(missing: str) -> None:
    named = "bandwidth_mbit_s" if missing == "exchange_s" else missing
    with pytest.raises(UsageError, match=f"cluster.{named}: not declared"):
        profile_of_declared_costs(
            conf_option("cluster", "ashl_paper", **{missing: None}), "LeNet", 1_000, 128
        )


def test_a_profile_needs_nothing_of_the_server() -> None:
    assert profile_of_declared_costs(
        conf_option("cluster", "ashl_paper", server_step_s=None), "LeNet", 1_000, 128
    ).workers


def test_costs_within_their_noise_count_as_equal_and_are_said_to() -> None:
    """The third worker's step lies outside of the least one's interval; what has no noise is what
    it is.
    """
    steps = {0.040: 0.002, 0.042: 0.001, 0.050: 0.001}
    costs = [
        {**WORKER, "step_s": step, "step_noise_s": noise, "push_s": step}
        for step, noise in steps.items()
    ]
    level = equalize_costs([WorkerProfile(**cost) for cost in costs])
    assert [worker.step_s for worker in level] == pytest.approx([0.041, 0.041, 0.050])
    assert [worker.push_s for worker in level] == list(steps)
    screen = Console(file=io.StringIO(), width=80)
    print_profile(screen, replace(profile(), workers=level))
    assert "equal within their noise: step of workers 0, 1" in screen.file.getvalue()  # ty: ignore[unresolved-attribute]


@pytest.mark.parametrize("planner", [PAPER, BALANCED, DyLU()], ids=["paper", "balanced", "dylu"])
def test_workers_equal_within_their_noise_get_equal_steps_and_densities(planner: Planner) -> None:
    """Two equal workers of a slow third: their steps, transfers, latencies and encodings differ by
    noise alone.
    """
    noise = {"step_noise_s": 0.002, "push_noise_s": 0.002, "pull_noise_s": 0.002}
    equal = [
        {
            "step_s": 0.040,
            "push_s": 0.030,
            "pull_s": 0.020,
            "latency_s": 0.0100,
            "compress_s": 0.004,
        },
        {
            "step_s": 0.041,
            "push_s": 0.031,
            "pull_s": 0.021,
            "latency_s": 0.0103,
            "compress_s": 0.005,
        },
    ]
    third = {"step_s": 0.1, "push_s": 0.05, "latency_s": 0.02, "compress_s": 0.02}
    workers = [WorkerProfile(**{**WORKER, **noise, **own}) for own in (*equal, third)]
    noises = {"latency_s": [0.0002] * 3, "compress_s": [0.0006] * 3}
    found = replace(profile(), workers=equalize_costs(workers, noises))
    assert found.workers[0] == found.workers[1]
    assert found.workers[2].step_s == 0.1
    for h_preset, r_preset in ((2, None), (2, 0.1), (5, 0.5)):
        first, second, _ = planner.assign(found, h_preset, r_preset, lambda share: share)
        assert first == second
