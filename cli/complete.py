"""Completion of overrides: groups, options behind `=`, parameters behind a dot. Reads `conf/`
without Hydra.
"""

import re
from collections.abc import Iterator, Mapping

import typer

from ashl.config.catalog import CONF, Catalog, catalog, defaults, parameters, summary
from ashl.errors import AshlError


class Bare(str):
    """What bash wants behind `=`, where a new word begins for it: the value alone, let through by
    Typer's filter.
    """

    __slots__ = ()

    def startswith(self, *_: object) -> bool:
        return True


def complete(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Pairs of a completion and its help for the override that is being typed; none where anything
    is wrong.
    """
    words = [str(word) for word in ctx.params.get("overrides") or ()]
    cut = (
        len(words) > 1 and words[-1] == "=" and incomplete != ""
    )  # bash cuts KEY=VALUE into three words
    if cut:
        incomplete = f"{words[-2]}={incomplete}"
    elif incomplete == "" and words and "=" not in words[-1] and words[-2:-1] != ["="]:
        cut, incomplete = (
            True,
            f"{words[-1]}=",
        )  # the cursor is right behind "=", which Typer swallows
    chosen = defaults() | dict(re.findall(r"(\w+)(?: = |=)(\w+)", " ".join(words)))
    try:
        found = list(_candidates(catalog(ctx.params.get("config_dir")), chosen, incomplete))
    except (AshlError, OSError):
        return []
    found = [(word, text) for word, text in found if word.startswith(incomplete)]
    return [(Bare(word.partition("=")[2]), text) for word, text in found] if cut else found


def _candidates(
    groups: Catalog, chosen: Mapping[str, str], incomplete: str
) -> Iterator[tuple[str, str]]:
    """All that may begin with `incomplete`: the groups, or the options and parameters of the only
    one that fits.
    """
    head = re.split("[=.]", incomplete)[0]
    fitting = (
        [head] if head in groups else [group for group in groups if group.startswith(incomplete)]
    )
    if len(fitting) != 1:
        yield from ((f"{group}=", "") for group in fitting)
    for group in fitting if len(fitting) == 1 else ():
        yield from ((f"{group}={option}", summary(file)) for option, file in groups[group].items())
        if file := groups[group].get(chosen.get(group, "")):
            yield from ((f"{group}.{p.key}=", p.comment) for p in parameters(file))
    yield from ((f"{p.key}=", p.comment) for p in parameters(CONF / "config.yaml"))
