"""Shell completion of settings: groups, options after `=`, parameters after a dot.

It reads `conf/` without Hydra, which takes too long to import.
"""

import re
from collections.abc import Iterator, Mapping

import typer

from ashl.config.catalog import CONF, Catalog, catalog, defaults, parameters, summary
from ashl.errors import AshlError


class Bare(str):
    """A completion after `=`, where a new word begins for bash: the value alone.

    Typer drops completions that do not start with the typed text, so `startswith` is always True.
    """

    __slots__ = ()

    def startswith(self, *_: object) -> bool:
        return True


def complete(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return pairs of a completion and its help for the setting that is typed; none after an
    error.
    """
    words = [str(word) for word in ctx.params.get("overrides") or ()]
    # bash splits KEY=VALUE into three words
    cut = len(words) > 1 and words[-1] == "=" and incomplete != ""
    if cut:
        incomplete = f"{words[-2]}={incomplete}"
    elif incomplete == "" and words and "=" not in words[-1] and words[-2:-1] != ["="]:
        # the cursor is right after "=", which Typer drops
        cut = True
        incomplete = f"{words[-1]}="
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
    """Yield candidates for `incomplete`: groups, or the options and parameters of the only group
    that fits.
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
