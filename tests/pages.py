"""The content of the pages, read for the tests: links, anchors, commands, tables of options.

`python -m tests.pages` writes the tables of docs/configuration.md from conf/, and those of
docs/limits.md from the checks.
"""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from pathlib import Path

from ashl.config.catalog import CONF, Parameter, catalog, parameters, summary, usual
from ashl.config.compose import PRESETS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CONFIGURATION = ROOT / "docs" / "configuration.md"
LIMITS = ROOT / "docs" / "limits.md"
MATRIX = re.compile(r"(<!-- from the checks -->\n).*?(<!-- end -->)", re.S)
COMMANDS = (
    "train",
    "sweep",
    "launch",
    "join",
    "advise",
    "calibrate",
    "replay",
    "profile",
    "list",
    "compare",
    "export",
    "doctor",
    "ui",
)
TABLE = re.compile(r"(<!-- from conf: (\w+) -->\n).*?(<!-- end -->)", re.S)
FENCE = re.compile(r"^```.*?^```$", re.S | re.M)
FILES = (".json", ".yaml", ".py")
MANY = 3  # more defaults than so many are not listed beside a key


def prose(text: str) -> str:
    """A page without its blocks of code."""
    return FENCE.sub("", text)


def links(text: str) -> list[str]:
    """The targets of links and pictures."""
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", prose(text)))


def anchors(text: str) -> set[str]:
    """The anchors that a repository's web view gives to the headings."""
    found: dict[str, int] = defaultdict(int)
    names = set()
    for heading in re.findall(r"^#+ (.+)$", prose(text), re.M):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        names.add(f"{slug}-{found[slug]}" if found[slug] else slug)
        found[slug] += 1
    return names


def shown(text: str) -> list[str]:
    """Every `ashl …` and `torchrun … -m ashl.cli …` in blocks of shell lines and between
    backticks.
    """
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.S | re.M)
    lines = [
        part.strip() for block in blocks for line in joined(block) for part in line.split("&&")
    ]
    lines += [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose(text))]
    named = re.compile(rf"(\.venv/bin/)?ashl ({'|'.join(COMMANDS)})\b|torchrun ")
    return [re.sub(r"\s+#.*$", "", line) for line in lines if named.match(line)]


def joined(block: str) -> list[str]:
    """The lines of a block of shell commands, continued lines as one."""
    return block.replace("\\\n", " ").splitlines()


def words_of(line: str) -> list[str]:
    """`train`, its options and its overrides."""
    words = shlex.split(line)
    at = next(i for i, word in enumerate(words) if word in COMMANDS)
    return words[at:]


def mentioned(text: str, beginnings: set[str]) -> list[tuple[str, str]]:
    """(key, value) of every `key=value`, and of every `group.key`, between backticks; `beginnings`
    are first words of keys. Of `stop.*` nothing is said.
    """
    spans = re.findall(r"(?<!`)`([^`]+)`(?!`)", prose(text))
    found = [
        re.fullmatch(r"([a-z_]+(?:\.[a-z_0-9]+)*)(?:=(.*))?", word.strip("'"))
        for s in spans
        for word in s.split()
    ]
    keys = [
        (match[1], match[2] or "") for match in found if match and ("." in match[1] or match[2])
    ]
    return [
        (key, value)
        for key, value in keys
        if key.partition(".")[0] in beginnings and not key.endswith(FILES)
    ]


def modules(text: str) -> set[str]:
    """The modules that the page runs with `python -m`."""
    return set(re.findall(r"python3? -m (tests[.\w]*\w)", text))


def tables(group: str) -> str:
    """The options of a group, and the keys that they have."""
    options = catalog()[group]
    chosen = usual()[group]
    lines = ["| option | what it is |", "| --- | --- |"]
    for option, file in options.items():
        lines.append(
            f"| `{option}`{' (default)' if option == chosen else ''} | {cell(summary(file))} |"
        )
    if group in PRESETS:
        return "\n".join(lines)
    rows = keys(group)
    if rows:
        lines += ["", "| key | default | options | meaning |", "| --- | --- | --- | --- |", *rows]
    return "\n".join(lines)


def keys(group: str) -> list[str]:
    """A row for each key and meaning, those of one key together: its defaults, and which options
    have it.
    """
    options = catalog()[group]
    having: dict[str, dict[str, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for option, file in options.items():
        for parameter in parameters(file):
            having[parameter.key][parameter.comment][option] = parameter.value
    return [
        f"| `{group}.{key}` | {default(values)} | {who(list(values), list(options))} |"
        f" {cell(meaning)} |"
        for key, meanings in having.items()
        for meaning, values in meanings.items()
    ]


def default(values: dict[str, str]) -> str:
    """The most usual value, then the others with the options that have them."""
    by_value: dict[str, list[str]] = defaultdict(list)
    for option, value in values.items():
        by_value[value].append(option)
    if len(by_value) > MANY:
        return "by option"
    usual, *others = sorted(by_value, key=lambda value: -len(by_value[value]))
    return ", ".join(
        [f"`{usual}`", *(f"`{value}` ({', '.join(by_value[value])})" for value in others)]
    )


def who(having: list[str], options: list[str]) -> str:
    """The options that have a key, or where those are fewer, the others."""
    lacking = [option for option in options if option not in having]
    if not lacking:
        return "all"
    few, before = (lacking, "all but ") if len(lacking) < len(having) else (having, "")
    return before + ", ".join(f"`{option}`" for option in few)


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def outside() -> str:
    """The keys that belong to no group."""
    rows = [row(parameter) for parameter in parameters(CONF / "config.yaml")]
    return "\n".join(["| key | default | meaning |", "| --- | --- | --- |", *rows])


def row(parameter: Parameter) -> str:
    return f"| `{parameter.key}` | `{parameter.value}` | {cell(parameter.comment)} |"


def written(text: str) -> str:
    """The page with its tables as conf/ has them."""

    def table(found: re.Match[str]) -> str:
        content = outside() if found[2] == "outside" else tables(found[2])
        return f"{found[1]}\n{content}\n\n{found[3]}"

    return TABLE.sub(table, text)


def with_matrix(text: str, lines: list[str]) -> str:
    """Return the page of limits with these lines as its support matrix."""
    return MATRIX.sub(lambda found: "\n".join((found[1], *lines, "", found[2])), text)


if __name__ == "__main__":
    from tests.support_matrix import lines

    LIMITS.write_text(with_matrix(LIMITS.read_text(encoding="utf-8"), lines()), encoding="utf-8")
    CONFIGURATION.write_text(written(CONFIGURATION.read_text(encoding="utf-8")), encoding="utf-8")
