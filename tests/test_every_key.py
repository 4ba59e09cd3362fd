"""Differential: a value other than the default of any key changes something that is recorded, or is
refused.
"""

import hashlib
import math
import re
from functools import cache

import pytest

import ashl
from ashl.config.catalog import CONF, catalog, load_yaml, parameters
from ashl.config.compose import PRESETS, compose
from ashl.config.construct import construct
from ashl.errors import AshlError, NoEffectError, UsageError
from ashl.planning.compile_plan import compile_plan
from ashl.runtime.effects import PeerFailedError
from tests.conf_option import values
from tests.every_key import (
    ALWAYS,
    BESIDE,
    COUNTS,
    CROSSING,
    NEVER,
    OUTSIDE,
    OWN,
    OWN_OUTSIDE,
    QUIET,
    VALUES,
    Case,
    cases,
    crossing,
)
from tests.support import run, slow_unless

CASES = list(cases())
OPTIONS = sorted({case.option for case in CASES})
QUICK = (
    "outer=co2",
    "overlap=delayed",
    "sync=d_admm",
    "aggregate=fednova",
    "planner=balanced",
    "schedule=single",
)
QUICK_CROSSING = ()
TEXTS = (
    "cluster.trace",
    "dataset.path",
    "dataset.root",
    "model.name",
    "runtime.interface",
    "topology.graph",
    "tracking.experiment",
)
NAMES_A_KEY = re.compile(r"\w+\.\w+=|\w+=\w+|cluster\.node")


@cache
def recorded(overrides: tuple[str, ...], typed: tuple[str, ...] = ()) -> str:
    """Return the hash of what a run in virtual time records, with the model that it ends with and
    its scores.
    """
    plan = compile_plan(compose(overrides), None, typed, strict=True)
    try:
        ran = run(plan)
    except (AshlError, PeerFailedError) as error:  # how a run fails is recorded, too
        return str(error)
    params = ran.snapshots[-1][1] if ran.snapshots else None
    if not hasattr(params, "numpy") or ran.learner is None:
        return hashlib.sha256(repr(ran.records).encode()).hexdigest()
    scores = ran.learner.evaluate(params)
    return hashlib.sha256(
        repr((ran.records, scores)).encode() + params.numpy().tobytes()
    ).hexdigest()


def fault(case: Case, base: tuple[str, ...]) -> str | None:
    """Return what is wrong with a typed value beside a base; None if it changes something or is
    refused rightly.
    """
    before = recorded(base)
    try:
        return (
            None
            if recorded((*base, case.typed), (case.typed,)) != before
            else f"{case.typed} changes nothing"
        )
    except UsageError as error:
        text = str(error)
        if "is not possible" in text or not NAMES_A_KEY.search(text.replace(case.typed, "")):
            return f"{case.typed}: {text}"
        if not isinstance(error, NoEffectError):
            return None
    never = f"{case.option} {case.key}" in NEVER
    return None if never or base != case.base else uncounted(case)


def uncounted(case: Case) -> str | None:
    """Return what is wrong where a refused value stands beside what makes its key count."""
    base = (*case.base, *case.counts)
    if not case.counts:
        return f"{case.typed} is refused, and COUNTS does not say where it counts"
    if recorded((*base, case.typed), (case.typed,)) == recorded(base):
        return f"{case.typed} changes nothing with {' '.join(case.counts)}, either"
    return None


def walked(option: str) -> list[str]:
    return [
        text
        for case in CASES
        if case.option == option
        and f"{option} {case.key}" not in QUIET
        and (text := fault(case, case.base))
    ]


def crossed(name: str) -> list[str]:
    base = (*ALWAYS.split(), *CROSSING[name].split())
    chosen = {
        group: option for group, option in compose(base)["choices"].items() if group not in PRESETS
    }
    found = (
        fault(case, base)
        for case in crossing(CASES, name, chosen)
        if f"{name} {case.key}" not in QUIET
    )
    return [text for text in found if text]


@pytest.mark.parametrize("option", slow_unless(QUICK, OPTIONS))
def test_every_key_of_an_option_changes_a_run_or_is_refused_and_counts_elsewhere(
    option: str,
) -> None:
    assert walked(option) == []


@pytest.mark.parametrize("name", slow_unless(QUICK_CROSSING, CROSSING))
def test_every_key_of_all_groups_changes_a_run_or_is_refused_beside_other_choices(
    name: str,
) -> None:
    assert crossed(name) == []


def test_the_walk_has_every_key_of_every_group() -> None:
    walked = {(case.option, case.key) for case in CASES}
    keys = {
        (f"{group}={name}", f"{group}.{parameter.key}")
        for group, options in catalog().items()
        if group not in PRESETS
        for name, file in options.items()
        for parameter in parameters(file)
    }
    left_out = {
        (option, key)
        for option, key in keys - walked
        if option not in OUTSIDE and key not in OUTSIDE
    }
    assert left_out == {
        ("compression=gtopk", key) for key in ("compression.values", "compression.per_layer")
    }  # one value
    known = {f"{group}={name}" for group, options in catalog().items() for name in options}
    known |= {key for _, key in keys} | {" ".join(pair) for pair in keys}
    assert {*VALUES, *COUNTS, *OUTSIDE, *BESIDE, *NEVER} - known == set()


def refusal(spec: dict, group: str) -> str:
    """Return how an option is refused; "" if it can be constructed."""
    try:
        construct(spec, group)
    except UsageError as error:
        return str(error)
    return ""


def nonsense(key: str) -> list[float | str]:
    """Return values that a key cannot have: no clock can hold an endless time."""
    values: list[float | str] = [math.nan, -math.inf if key == "task.ignore_index" else -(10**9)]
    if key.endswith("_s") and not key.endswith("mbit_s"):
        values.append(1e300)
    return values if key in TEXTS else [*values, "x"]


@pytest.mark.parametrize("group", sorted(catalog().keys() - set(PRESETS)))
def test_no_key_takes_what_no_run_can_use(group: str) -> None:
    taken = [
        f"{key}={value}"
        for option, file in catalog()[group].items()
        for key in (f"{group}.{parameter.key}" for parameter in parameters(file))
        for value in nonsense(key)
        if f"{key}={value} is not possible"
        not in refusal({**values(group, option), key.removeprefix(f"{group}."): value}, group)
    ]
    assert taken == []


def left_by(*overrides: str) -> tuple[list[str], list[str]]:
    """Return the files of a run folder, and its records without the time of this machine."""
    folder = ashl.train(
        "runtime=sim", "tracking=none", "sync=bsp", "stop.steps=48", *overrides
    ).folder
    records = [folder / name for name in ("events.jsonl", "metrics.jsonl", "summary.json")]
    texts = [file.read_text() for file in records if file.is_file()]
    files = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*"))
    return files, [re.sub(r'"host_s": [^,}]*', "", text) for text in texts]


@pytest.mark.parametrize(
    "key",
    slow_unless(("stop.target_consecutive_evals", "eval.every_s"), OWN),
)
def test_every_key_of_the_run_itself_changes_its_records(key: str, workplace) -> None:
    value, beside = OWN[key]
    base = beside.split()
    assert left_by(*base, f"{key}={value}") != left_by(*base)


def test_the_name_and_the_place_of_a_run_are_as_typed(workplace) -> None:
    brief = ("runtime=sim", "tracking=none", "sync=bsp", "stop.steps=4")
    assert "mine" in ashl.train(*brief, "name=mine").folder.name
    assert ashl.train(*brief, "run.dir=there").folder.resolve() == workplace / "there"


def test_the_walk_has_every_key_of_the_run_itself() -> None:
    own = load_yaml(CONF / "config.yaml")
    del own["defaults"]
    keys = {f"{part}.{key}" for part in ("run", "stop", "eval") for key in own[part]}
    keys |= {key for key in own if not isinstance(own[key], dict)} | {"tracking.events"}
    assert keys == OWN.keys() | OWN_OUTSIDE.keys()
