"""Write the support matrix of docs/reference/support_matrix.md by calling the program's own checks.

`lines` asks for every topology, sync mode and overlap what `ashl train` would ask, and returns
Markdown: a table for each topology, and the sentences of the checks as numbered notes. Nothing is
run: a combination is planned without gradients and without a prediction. `python -m tests.pages`
writes the page.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

from ashl.cluster.spec import Event
from ashl.config.catalog import catalog
from ashl.config.compose import compose
from ashl.errors import AshlError, UsageError
from ashl.overlap.contract import Delayed
from ashl.planning import compile_plan
from ashl.planning.compatibility import (
    check_faults,
    check_max_restarts,
)
from ashl.planning.instantiate import OptionFactory, Parts
from tests.every_key import BESIDE, LINKS, NODES

BASE = (
    "runtime=sim",
    "tracking=none",
    "model=mlp",
    "model.hidden=[16,16,16]",
    "dataset.batch_size=4",
)
NEEDS = {
    "halos": f"{NODES} topology.updates=4",
    "partial_all_reduce": NODES,
}  # what a topology needs
MODE_NEEDS = {"ahl": "schedule.h_preset=[2]"}  # beside what `tests.every_key` has
NOT_MODES = {"profiling"}  # what `ashl profile` runs
PULLS = ("compression=topk", "topology.pull_ratio=0.1")
COLUMNS = (
    "failure",
    "rejoin",
    "delayed",
    "buckets",
    "compressed pulls",
)

Row = tuple[str, ...]  # a cell for each of `COLUMNS`


@contextmanager
def only_checks() -> Iterator[None]:
    """Plan without a prediction, with data and learner made once for all plans of the same
    model.
    """
    make, learners = compile_plan.make_learner, dict[str, Any]()

    def learner(parts: Mapping[str, Any], data: Any, settings: Any) -> Any:
        key = repr((parts["model"], parts["task"]))
        if key not in learners:
            learners[key] = make(parts, data, settings)
        return learners[key]

    with ExitStack() as stack:
        for name, stand_in in {
            "load_data": cache(compile_plan.load_data),
            "make_learner": learner,
            "add_prediction": lambda plan, *_: plan,
        }.items():
            stack.enter_context(patch.object(compile_plan, name, stand_in))
        yield


class Notes:
    """The sentences of the checks, numbered in the order in which a table first names them."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def of(self, sentence: str) -> str:
        return f"({self.numbers.setdefault(sentence, len(self.numbers) + 1)})"


def extras(sync: str, topology: str) -> list[tuple[str, ...]]:
    """Settings beside the defaults with which a sync mode may be legal: none, and those that its
    option needs.
    """
    needed = [
        word
        for word in MODE_NEEDS.get(sync, BESIDE.get(f"sync={sync}", "")).split()
        if not word.startswith(("topology=", "cluster"))
    ]
    needed = [word for word in needed if topology == "gossip" or not word.startswith("topology.")]
    return [(), tuple(needed)] if needed else [()]


def refusal(act: Callable[[], object]) -> str | None:
    """Return the sentence with which the program refuses, or None."""
    try:
        act()
    except AshlError as error:
        return str(error)
    return None


def planned(config: Mapping[str, Any]) -> Any:
    return compile_plan.prepare_plan(config)


def with_overlap(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the configuration with another overlap, as `overlap=NAME` would choose it."""
    return {
        **config,
        "overlap": spec("overlap", name),
        "choices": {**config["choices"], "overlap": name},
    }


@cache
def spec(group: str, name: str) -> dict[str, Any]:
    return compose([*BASE, f"{group}={name}"])[group]


@cache
def local_runtime() -> Any:
    return OptionFactory(()).get_option("runtime", compose(["runtime=local"])["runtime"])


def with_events(parts: Parts, *kinds: str) -> Parts:
    events = tuple(Event(time_s=1.0 + k, worker=1, **{kind: True}) for k, kind in enumerate(kinds))
    return replace(parts, cluster=replace(parts.cluster, events=events))


def both(sim: str | None, real: str | None, note: Callable[[str], str]) -> str:
    """Return a cell of what is asked in virtual time and on processes."""
    if sim is None and real is None:
        return "yes"
    if sim is not None and real is not None:
        return f"no {note(sim)}"
    return f"sim only {note(real)}" if real is not None else f"processes only {note(sim or '')}"


def row_of(found: Any, note: Callable[[str], str]) -> list[str]:
    """Return the cells for failure and rejoin of a plan that is legal."""
    sim, stages = found.parts, found.plan.stages
    real = replace(sim, runtime=local_runtime())
    restarting = replace(sim, runtime=replace(local_runtime(), max_restarts=1))
    failed, rejoined = with_events(sim, "fail"), with_events(sim, "fail", "rejoin")
    return [
        both(
            refusal(lambda: check_faults(failed, stages)),
            refusal(lambda: check_faults(with_events(real, "fail"), stages)),
            note,
        ),
        both(
            refusal(lambda: check_faults(rejoined, stages)),
            refusal(lambda: check_max_restarts(restarting)),
            note,
        ),
    ]


def rows_of(topology: str, sync: str, number: Callable[[str], str]) -> list[tuple[str, Row]] | str:
    """Return (overlaps, cells) of each group of overlaps that has the same cells; the refusal of a
    mode that is not legal with this topology.
    """

    def note(sentence: str) -> str:
        """Return the note's number, with `…` for what the row is about."""
        sentence = re.sub(r"(does not provide it); .*", r"\1", sentence)  # alternatives differ
        for name in (f"sync={sync}", f"topology={topology}"):
            kind = name.partition("=")[0]
            sentence = re.sub(rf"{re.escape(name)}\b", f"{kind}=…", sentence)
        return number(sentence.replace(f"stage {sync}", "the stage"))

    why = None
    for extra in extras(sync, topology):
        words = [
            *BASE,
            f"topology={topology}",
            f"sync={sync}",
            *NEEDS.get(topology, LINKS).split(),
            *extra,
        ]
        try:
            config = compose(words)
            first = planned(config)
            break
        except UsageError as error:
            why = str(error)
    else:
        return note(why or "")
    legal: dict[str, Any] = {"none": first}
    refused = dict[str, str]()
    for name in catalog()["overlap"]:
        if name != "none":
            try:
                legal[name] = planned(with_overlap(config, name))
            except UsageError as error:
                refused[name] = str(error)
    delayed = {name for name in catalog()["overlap"] if name in legal and is_delayed(legal[name])}
    buckets = [name for name in legal if name != "none" and name not in delayed]
    pulls = refusal(lambda: planned(compose([*words, *PULLS])))
    choices = [
        ", ".join(f"`{name}`" for name in sorted(delayed)) or f"no {note(refused['delayed'])}",
        ", ".join(f"`{name}`" for name in buckets) or f"no {note(refused['wfbp'])}",
        "yes" if pulls is None else f"no {note(pulls)}",
    ]
    found: dict[Row, list[str]] = {}
    for name, plan in legal.items():

        def shown(sentence: str, name: str = name) -> str:
            return note(sentence.replace(f"overlap={name}", "overlap=…"))

        found.setdefault(tuple(row_of(plan, shown)), []).append(name)
    none, *others = sorted(found.items(), key=lambda item: "none" not in item[1])
    rows = [(", ".join(f"`{name}`" for name in none[1]), (*none[0], *choices))]
    return rows + [
        (", ".join(f"`{name}`" for name in names), (*cells, "", "", "")) for cells, names in others
    ]


def is_delayed(found: Any) -> bool:
    return isinstance(found.parts.stages[0].overlap, Delayed)


def lines() -> list[str]:
    """Return the lines of the matrix: a table for each topology, then the notes."""
    notes, text = Notes(), list[str]()
    with only_checks():
        for topology in catalog()["topology"]:
            text += table(topology, notes)
    return [
        *text,
        "### Notes",
        "",
        "```text",
        *(f"({n}) {sentence}" for sentence, n in notes.numbers.items()),
        "```",
    ]


def table(topology: str, notes: Notes) -> list[str]:
    """Return the table of a topology, with a row for the sync modes that have the same cells."""
    groups: dict[tuple[tuple[str, Row], ...], list[str]] = {}
    refused: dict[str, list[str]] = {}
    for sync in catalog()["sync"]:
        if sync in NOT_MODES or not fits(topology, sync):
            continue
        found = rows_of(topology, sync, notes.of)
        if isinstance(found, str):
            refused.setdefault(found, []).append(sync)
        else:
            groups.setdefault(tuple(found), []).append(sync)
    head = ["sync", "overlap", *COLUMNS]
    text = [f"### topology={topology}", "", bar(head), bar(["---"] * len(head))]
    for rows, syncs in groups.items():
        for k, (overlaps, cells) in enumerate(rows):
            text.append(
                bar([", ".join(f"`{name}`" for name in syncs) if k == 0 else "", overlaps, *cells])
            )
    for why, syncs in refused.items():
        text += ["", f"Refused as it is: {', '.join(f'`{name}`' for name in syncs)} {why}"]
    return [*text, ""]


@cache
def option(group: str, name: str) -> Any:
    return OptionFactory(()).get_option(group, spec(group, name))


def fits(topology: str, sync: str) -> bool:
    """Return True if the topology has a loop for this type of sync mode."""
    return isinstance(option("sync", sync), option("topology", topology).policy_type)


def bar(cells: list[str]) -> str:
    return re.sub(r" +", " ", f"| {' | '.join(cells)} |")


def read_rows(page: str, topology: str, sync: str) -> list[list[str]]:
    """Return the cells of a sync mode's rows on the page, without the numbers of notes."""
    table = page.partition(f"### topology={topology}\n")[2].partition("\n### ")[0]
    rows, mine = list[list[str]](), False
    for line in re.findall(r"^\|(.*)\|$", table, re.M):
        first, *cells = (cell.strip() for cell in line.split("|"))
        mine = f"`{sync}`" in first.split(", ") if first else mine
        if mine:
            rows.append([re.sub(r" \(\d+\)", "", cell) for cell in cells])
    return rows
