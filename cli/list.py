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
    effective_defaults,
    parameters,
    parents,
    read_text,
    summary,
    symbols,
    target,
    unknown_name_error,
    values,
)
from ashl.config.override import command_text

from .answer import Answer, Json
from .table import show_rows, wrap_text
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
    config_dir: ConfigDir = None,
    json: Json = False,
    debug: Debug = False,
) -> Answer:
    """Show all groups, the options of one group, or the card of one option."""
    known = catalog(config_dir)
    if group is None:
        groups = {
            name: {"default": effective_defaults()[name], "options": [*options]}
            for name, options in known.items()
        }
        return Answer(
            {"groups": groups}, partial(_show_groups, known), command_text("list", "sync")
        )
    if group not in known:
        raise unknown_name_error("group", group, known)
    if option is None:
        entries = _entries(group, known[group])
        document = {"group": group, "options": entries}
        following = command_text("list", group, *[entry["name"] for entry in entries[:1]])
        return Answer(document, partial(_show_entries, entries), following)
    if option not in known[group]:
        raise unknown_name_error(group, option, known[group])
    file = known[group][option]
    document: dict[str, Any] = {
        "group": group,
        "option": option,
        **_entry(file),
        "target": target(file),
        "card": _card_text(file, group) if target(file) else read_text(file),
        "parameters": [{**asdict(p), "key": f"{group}.{p.key}"} for p in parameters(file)],
        "file": str(file),
    }
    following = command_text("list", group)
    if group == "sync" and document["status"] in ("recommended", "situational"):
        needed = NEEDED.get(document["family"], ())
        following = command_text("train", "runtime=sim", f"sync={option}", *needed)
    return Answer(document, partial(_show_card, group, option, file), following)


def _entry(file: Path) -> dict[str, str]:
    """Return what the card of an option says in one line each."""
    text = "\n\n".join(docstrings(target(file))) if target(file) else ""
    return {
        "family": _card_line(text, "Family"),
        "status": _card_line(text, "Status"),
        "summary": summary(file),
    }


def _card_line(text: str, what: str) -> str:
    """Return the value of the line `Family: …` or `Status: …` of a card, or ""."""
    found = re.search(rf"^{what}: (.+?)\.?$", text, re.M)
    return found[1] if found else ""


def _entries(group: str, options: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Return the options of a group by family, and in it by status, most useful first."""
    chosen = effective_defaults().get(group)
    found = [
        {"name": name, "default": name == chosen, **_entry(file)} for name, file in options.items()
    ]
    return sorted(
        found,
        key=lambda own: (*_sort_key(own["family"], FAMILIES), *_sort_key(own["status"], STATUSES)),
    )


def _sort_key(word: str, known: Collection[str]) -> tuple[int, str]:
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
    show_rows("", rows)
    if len(families) > 1:
        print("\n" + "\n".join(f"{status}: {why}" for status, why in STATUSES.items()))


def _show_groups(known: Mapping[str, Mapping[str, Path]]) -> None:
    chosen = effective_defaults()
    rows = [
        (group, chosen[group] or "-", ", ".join(options) or "none yet")
        for group, options in known.items()
    ]
    show_rows("GROUP=OPTION, with its default", rows)
    alone = ", ".join(
        f"{group}={option}"
        for group, option in defaults().items()
        if group not in ("schedule", "sync") and option != chosen[group]
    )
    print(
        f"\nschedule={chosen['schedule']} names the sync modes of its stages. A named sync mode,\n"
        f"as in sync=asp, brings schedule=single and these options:\n{alone}."
    )
    show_rows(
        "\nKEY=VALUE", [(p.key, p.value, p.comment) for p in parameters(CONF / "config.yaml")]
    )
    print(
        "\n`ashl list GROUP` explains its options,\n`ashl list GROUP OPTION` shows one with its"
        " parameters."
    )


def _card_text(file: Path, group: str) -> str:
    """Return the text of an option's card."""
    return "\n\n".join(filter(None, [card_text(file), symbols(group)]))


def _show_card(group: str, option: str, file: Path) -> None:
    name = target(file)
    if name:
        print(wrap_text(f"{group}={option}\n\n{_card_text(file, group)}"))
        rows = [(f"{group}.{p.key}", p.value, p.comment) for p in parameters(file)]
        if rows:
            show_rows("\nParameters and their defaults", rows)
        if group == "compression":
            from ashl.compression.guarantees import D, list_guarantees
            from ashl.config.construct import construct

            codec = construct(values(file), group, (name.partition(".")[0],))
            show_rows(f"\nGuarantees, for {D:,} elements", list_guarantees(codec))
        print(f"\n{name}, from {file}")
    else:  # a preset is shown as its file
        print(f"{group}={option}")
        for source in (file, *parents(file)):
            print(f"\n{read_text(source).rstrip()}\n\nfrom {source}")
