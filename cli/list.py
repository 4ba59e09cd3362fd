"""`ashl list`: show the groups, their options, and the card of an option."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ashl.config.catalog import (
    CONF,
    card_text,
    catalog,
    defaults,
    docstrings,
    held,
    lacking,
    load,
    parameters,
    parents,
    read,
    summary,
    symbols,
    target,
    usual,
    values,
)
from ashl.config.override import command_text
from ashl.errors import UsageError

from .answer import Answer, Json
from .table import folded, show
from .train import ConfigDir, Debug

# families of sync modes, in the order of the list
FAMILIES = (
    "synchronous steps",
    "local SGD",
    "bounded staleness",
    "asynchronous server",
    "gossip",
    "partial all-reduce",
    "adaptive optimizers",
    "stages of ASHL",
)
# settings that the sync modes of a family need beside `sync`
NEEDED = {
    "gossip": ("topology=gossip",),
    "partial all-reduce": ("topology=partial_all_reduce",),
    "adaptive optimizers": ("topology=all_reduce", "optimizer=adam"),
}
STATUSES = {
    "recommended": "take it first",
    "situational": "better under the conditions on its card",
    "reproduction": "for comparison with its paper",
    "internal": "chosen by a schedule, not typed",
}


def _groups() -> list[str]:
    return [*catalog()]


def _options(ctx: typer.Context) -> list[str]:
    return [*catalog().get(ctx.params.get("group") or "", ())]


def show_options(
    group: Annotated[
        str | None, typer.Argument(help="One group, for example sync.", autocompletion=_groups)
    ] = None,
    option: Annotated[
        str | None,
        typer.Argument(help="One of its options, for example ssp.", autocompletion=_options),
    ] = None,
    markdown: Annotated[
        bool, typer.Option(help="Print all options, or those of one group, as Markdown tables.")
    ] = False,
    places: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="With --markdown: the ranks of options in these runs."),
    ] = None,
    config_dir: ConfigDir = None,
    json: Json = False,
    debug: Debug = False,
) -> Answer:
    """Show all groups, the options of one group, or the card of one option."""
    known = catalog(config_dir)
    if places and (not markdown or option is not None):
        raise UsageError(
            "--places is a column of the page; ask for that: ashl list --markdown --places FOLDER."
        )
    if markdown and option is None:
        if group is not None and group not in known:
            raise lacking("group", group, known)
        page = _page(known, [*known] if group is None else [group], places or ())
        return Answer({"markdown": page}, lambda: print(page))
    if group is None:
        groups = {
            name: {"default": usual()[name], "options": [*options]}
            for name, options in known.items()
        }
        return Answer({"groups": groups}, partial(_everything, known), command_text("list", "sync"))
    if group not in known:
        raise lacking("group", group, known)
    if option is None:
        entries = _entries(group, known[group])
        document = {"group": group, "options": entries}
        following = command_text("list", group, *[entry["name"] for entry in entries[:1]])
        return Answer(document, partial(_show_entries, entries), following)
    if option not in known[group]:
        raise lacking(group, option, known[group])
    file = known[group][option]
    document: dict[str, Any] = {
        "group": group,
        "option": option,
        **_entry(file),
        "target": target(file),
        "card": _about(file, group) if target(file) else read(file),
        "parameters": [{**asdict(p), "key": f"{group}.{p.key}"} for p in parameters(file)],
        "file": str(file),
    }
    following = command_text("list", group)
    if group == "sync" and document["status"] in ("recommended", "situational"):
        needed = NEEDED.get(document["family"], ())
        following = command_text("train", "runtime=sim", f"sync={option}", *needed)
    return Answer(document, partial(_card, group, option, file), following)


def _entry(file: Path) -> dict[str, str]:
    """Return what the card of an option says in one line each."""
    text = "\n\n".join(docstrings(target(file))) if target(file) else ""
    return {
        "family": _line(text, "Family"),
        "status": _line(text, "Status"),
        "summary": summary(file),
    }


def _line(text: str, what: str) -> str:
    """Return the value of the line `Family: …` or `Status: …` of a card, or ""."""
    found = re.search(rf"^{what}: (.+?)\.?$", text, re.M)
    return found[1] if found else ""


def _entries(group: str, options: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Return the options of a group by family, and in it by status, most useful first."""
    chosen = usual().get(group)
    found = [
        {"name": name, "default": name == chosen, **_entry(file)} for name, file in options.items()
    ]
    return sorted(
        found, key=lambda own: (*_place(own["family"], FAMILIES), *_place(own["status"], STATUSES))
    )


def _place(word: str, known: Collection[str]) -> tuple[int, str]:
    """Return the sort key of a word: known ones in their order, then all others by name."""
    return ([*known, word].index(word), word)


def _show_entries(entries: Sequence[dict[str, Any]]) -> None:
    """Print the options, with a line before each family."""
    families = list(dict.fromkeys(own["family"] for own in entries))
    rows: list[tuple[str, ...]] = []
    for family in families:
        if len(families) > 1:
            rows += [("",) * 3] * bool(rows) + [(f"{family or 'your own'}:", "", "")]
        rows += [
            (own["name"], "default" if own["default"] else own["status"], own["summary"])
            for own in entries
            if own["family"] == family
        ]
    show("", rows)
    if len(families) > 1:
        print("\n" + "\n".join(f"{status}: {why}" for status, why in STATUSES.items()))


def _page(
    known: Mapping[str, Mapping[str, Path]], groups: Sequence[str], folders: Sequence[Path]
) -> str:
    """Return Markdown tables, one per group, with a row for each option.

    Columns: summary, topologies (of a sync mode), limits, their tests, presets that compare the
    option, its rank in each folder of runs, and its source. Empty columns are left out.
    """
    compared = _compared(known)
    tests = held()
    ranked = _ranked(known, folders)
    parts: list[str] = []
    for group in groups:
        columns: dict[str, list[str]] = {
            "option": [f"`{name}`" for name in known[group]],
            "what it is": [summary(file) for file in known[group].values()],
            "topology": [
                _topologies(target(file)) if group == "sync" else ""
                for file in known[group].values()
            ],
            "limits": [_paragraph(target(file), "Limit") for file in known[group].values()],
            "held by": [
                ", ".join(f"`{test}`" for test in tests.get(f"{group}={name}", ()))
                for name in known[group]
            ],
            "compared in": [", ".join(compared.get((group, name), ())) for name in known[group]],
            **{
                f"place in {folder}": [found.get((group, name), "") for name in known[group]]
                for folder, found in ranked.items()
            },
            "source": [_paragraph(target(file), "Source") for file in known[group].values()],
        }
        filled = {title: cells for title, cells in columns.items() if any(cells)}
        rows = [tuple(filled), ("---",) * len(filled), *zip(*filled.values(), strict=True)]
        table = [
            "| " + " | ".join(cell.replace("|", "\\|") or "-" for cell in row) + " |"
            for row in rows
        ]
        parts.append("\n".join([f"## {group}", "", *table]))
    return "\n\n".join(parts)


def _ranked(
    known: Collection[str], folders: Sequence[Path]
) -> dict[str, dict[tuple[str, str], str]]:
    """Return for each folder of runs the rank of each option, by group and option."""
    from ashl.report.leaderboard import option_ranks, rank
    from ashl.report.records import read

    return {folder.resolve().name: option_ranks(rank(read([folder])), known) for folder in folders}


def _compared(known: Mapping[str, Mapping[str, Path]]) -> dict[tuple[str, str], list[str]]:
    """Return the presets whose grid has an option, by group and option."""
    found: dict[tuple[str, str], list[str]] = {}
    for preset, file in known.get("experiment", {}).items():
        lines = [line for line in load(file).get("sweep", ()) if isinstance(line, dict)]
        chosen = [
            (group, str(names)) for line in lines for group, names in line.items() if group in known
        ]
        if lines:
            swept = {group for line in lines for group in line}
            common = [entry for entry in load(file).get("defaults", ()) if isinstance(entry, dict)]
            shared = [
                (key.removeprefix("override /"), str(name))
                for entry in common
                for key, name in entry.items()
            ]
            chosen += [(group, name) for group, name in shared if group not in swept]
        for place in sorted(
            {(group, name.strip()) for group, names in chosen for name in names.split(",")}
        ):
            found.setdefault(place, []).append(preset)
    return found


def _paragraph(name: str, what: str) -> str:
    """Return the paragraph of a card after "Limits:" or "Source:", up to the next such word."""
    text = next((text for text in docstrings(name) if what in text), "") if name else ""
    found = re.search(
        rf"\b{what}s?:\s+(.+?)(?:\n\n|\s(?:Sources?:|Differs:|Departs from)|\Z)", text, re.DOTALL
    )
    return " ".join(found[1].split()) if found else ""


def _topologies(name: str) -> str:
    """Return the topologies that support a sync mode."""
    from ashl.config.construct import found

    rule: Any = found(name, "sync", (name.partition(".")[0],))
    kinds = dict[str, Any]()
    for topology, file in catalog()["topology"].items():
        kinds[topology] = found(target(file), "topology", ())
    return ", ".join(
        topology
        for topology, kind in kinds.items()
        if isinstance(rule, type) and issubclass(rule, kind.policy_type)
    )


def _laws(file: Path) -> None:
    """Show the guarantees of a codec, and its laws as measured on this machine."""
    from ashl.compression.laws import D, laws, list_guarantees
    from ashl.config.construct import construct

    codec = construct(values(file), "compression", (target(file).partition(".")[0],))
    show("\nGuarantees", list_guarantees(codec))
    rows = [(law.name, law.stated, law.measured, law.verdict) for law in laws(codec)]
    show(
        f"\nLaws: stated, and measured just now on {D:,} elements; relative error is ‖C(x) −"
        " x‖²/‖x‖²",
        rows,
    )


def _everything(known: Mapping[str, Mapping[str, Path]]) -> None:
    chosen = usual()
    rows = [
        (group, chosen[group] or "-", ", ".join(options) or "none yet")
        for group, options in known.items()
    ]
    show("GROUP=OPTION, with its default", rows)
    alone = ", ".join(
        f"{group}={option}"
        for group, option in defaults().items()
        if group != "schedule" and option != chosen[group]
    )
    print(
        f"\nschedule={chosen['schedule']} names the sync modes of its stages. A named sync mode,\n"
        f"as in sync=asp, brings schedule=single and these options:\n{alone}."
    )
    show("\nKEY=VALUE", [(p.key, p.value, p.comment) for p in parameters(CONF / "config.yaml")])
    print(
        "\n`ashl list GROUP` explains its options,\n`ashl list GROUP OPTION` shows one with its"
        " parameters."
    )


def _about(file: Path, group: str) -> str:
    """Return the text of an option's card."""
    return "\n\n".join(filter(None, [card_text(file), symbols(group)]))


def _card(group: str, option: str, file: Path) -> None:
    name = target(file)
    if name:
        print(folded(f"{group}={option}\n\n{_about(file, group)}"))
        rows = [(f"{group}.{p.key}", p.value, p.comment) for p in parameters(file)]
        if rows:
            show("\nParameters and their defaults", rows)
        if group == "compression":
            _laws(file)
        print(f"\n{name}, from {file}")
    else:  # a preset is shown as its file
        print(f"{group}={option}")
        for source in (file, *parents(file)):
            print(f"\n{read(source).rstrip()}\n\nfrom {source}")
