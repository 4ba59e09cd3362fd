"""The content of the pages, read for the tests: links, anchors, commands, keys, generated parts.

`python -m tests.pages` writes every generated part of docs/: the text between `<!-- from SOURCE:
NAME -->` and `<!-- end -->`. `SOURCES` lists the sources: conf/ (tables of options), docstrings
(method cards), the command line, comments of records, error classes, CSV files of results, and the
program's own checks.
"""

from __future__ import annotations

import ast
import csv
import inspect
import io
import re
import shlex
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ashl.errors
from ashl.cli.app import COMMANDS
from ashl.config.catalog import (
    CONF,
    Parameter,
    card_text,
    catalog,
    effective_defaults,
    parameters,
    summary,
    symbols,
)
from ashl.config.compose import PRESETS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
DATA = DOCS / "results" / "data"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
GENERATED = re.compile(r"(<!-- from (\w+): ([\w./]+) -->\n).*?(<!-- end -->)", re.S)
FENCE = re.compile(r"^```.*?^```$", re.S | re.M)
SETTING = re.compile(r"(?<![\w`.])[a-z_]+(?:\.[a-z_0-9]+)*=(?:\[[^\]]*\]|[^\s,;()]+)")
LABEL = re.compile(r"^([A-Z][\w ]{2,20}):(?=\s|$)")  # of a paragraph of a card
FILES = (".json", ".yaml", ".py")


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


def option_tables(group: str) -> str:
    """The options of a group, and the keys that they have; for `outside`, the keys of no group."""
    if group == "outside":
        rows = [row(parameter) for parameter in parameters(CONF / "config.yaml")]
        return "\n".join(["| key | default | meaning |", "| --- | --- | --- |", *rows])
    options = catalog()[group]
    chosen = effective_defaults()[group]
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
    """The value that most options have, then the others with their options; one option is named."""
    by_value: dict[str, list[str]] = defaultdict(list)
    for option, value in values.items():
        by_value[value].append(option)
    usual, *others = sorted(by_value, key=lambda value: -len(by_value[value]))
    named = others if len(by_value[usual]) > 1 or not others else [usual, *others]
    return ", ".join(
        [f"`{usual}`"] * (usual not in named)
        + [f"`{value}` ({', '.join(by_value[value])})" for value in named]
    )


def who(having: list[str], options: list[str]) -> str:
    """The options that have a key, or where those are fewer, the others."""
    lacking = [option for option in options if option not in having]
    if not lacking:
        return "all"
    few, before = (lacking, "all but ") if len(lacking) < len(having) else (having, "")
    return before + ", ".join(f"`{option}`" for option in few)


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def row(parameter: Parameter) -> str:
    return f"| `{parameter.key}` | `{parameter.value}` | {cell(parameter.comment)} |"


def cards(group: str) -> str:
    """The symbols of a group's cards, and the card of every option."""
    parts = [as_markdown(text)] if (text := symbols(group)) else []
    parts += [
        f"## {option}\n\n{with_links(as_markdown(card_text(file)), catalog()[group])}"
        for option, file in catalog()[group].items()
    ]
    return "\n\n".join(parts)


def method_names(_: str) -> str:
    """All options that have a card on a page of methods, by name, with a link to it."""
    rows = [
        f"| [`{option}`](methods/{group}.md#{option}) | `{group}` | {cell(summary(file))} |"
        for group, options in catalog().items()
        if (DOCS / "reference" / "methods" / f"{group}.md").is_file()
        for option, file in options.items()
    ]
    return "\n".join(["| option | group | in words |", "| --- | --- | --- |", *sorted(rows)])


def with_links(card: str, options: Mapping[str, Path]) -> str:
    """A card whose alternatives of the same group lead to their cards."""

    def link(found: re.Match[str]) -> str:
        return f"[{found[0]}](#{found[1]})" if found[1] in options else found[0]

    before, label, rest = card.partition("**Alternatives:** ")
    line, end, after = rest.partition("\n")
    return before + label + re.sub(r"`(\w+)`", link, line) + end + after


def as_markdown(card: str) -> str:
    """Text of a docstring: its labels in bold, its indented lines as they are."""
    blocks: list[list[str]] = []
    for line in card.splitlines():
        indented = line.startswith("    ")
        if not line.strip():
            blocks.append([])
        elif (
            not blocks
            or LABEL.match(line)
            or (blocks[-1] and indented != blocks[-1][-1].startswith("    "))
        ):
            blocks.append([line])
        else:
            blocks[-1].append(line)
    return "\n\n".join(block_as_markdown(block) for block in blocks if block)


def block_as_markdown(lines: list[str]) -> str:
    if lines[0].startswith("    "):
        return "\n".join(["```text", *(line[4:] for line in lines), "```"])
    text = " ".join(line.strip() for line in lines)
    label = LABEL.match(text)
    bold = f"**{label[1]}:** " if label else ""
    return bold + escaped(text[label.end() :].strip() if label else text)


def escaped(text: str) -> str:
    """Text in which Markdown finds no markup, except between backticks."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if part.startswith("`") else re.sub(r"([\\*_<\[\]$|~])", r"\\\1", part)
        for part in parts
    )


def result_table(name: str) -> str:
    """A CSV file of docs/results/data as a table; settings in it are set as code."""
    with (DATA / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(file)
    lines = [head, ["---"] * len(head), *rows]
    cells = [[SETTING.sub(r"`\g<0>`", cell(text)) for text in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def command_help(name: str) -> str:
    """Help, arguments and options of a command."""
    import typer

    from ashl.cli.app import app

    command: Any = typer.main.get_command(app)
    command = command.commands[name]
    named = [(argument(parameter), parameter) for parameter in command.params]
    usage = [word for word, parameter in named if not parameter.opts[0].startswith("-")]
    rows = [f"| `{word}` | {cell(parameter.help or '')} |" for word, parameter in named]
    about = "\n\n".join(" ".join(text.split()) for text in command.help.split("\n\n"))
    return "\n".join(
        [
            f"`{' '.join(['ashl', name, '[OPTIONS]', *usage])}`",
            "",
            about,
            "",
            "| argument or option | meaning |",
            "| --- | --- |",
            *rows,
        ]
    )


def argument(parameter: Any) -> str:
    """An argument or an option of a command, as its usage shows it."""
    metavar = parameter.metavar or parameter.name.upper()
    if parameter.opts[0].startswith("-"):
        words = ", ".join([*parameter.opts, *parameter.secondary_opts])
        return words if parameter.is_flag else f"{words} {metavar}"
    word = metavar if parameter.required else f"[{metavar}]"
    return f"{word}..." if parameter.nargs == -1 else word


def record_fields(place: str) -> str:
    """The keys of the dict that a function returns, with the comment above each; keys without a
    comment share that of the key before.

    Args: place, `FILE.FUNCTION`, the file from ashl/ on and without its ending.
    """
    path, _, function = place.rpartition(".")
    source = (ROOT / "ashl" / f"{path}.py").read_text(encoding="utf-8")
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip()
    }
    defined = next(
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == function
    )
    returned = next(
        node
        for statement in ast.walk(defined)
        if isinstance(statement, ast.Return | ast.Expr | ast.Assign) and statement.value
        for node in ast.walk(statement.value)
        if isinstance(node, ast.Dict)
    )
    rows: list[tuple[list[str], str]] = []
    for names, line in dict_keys(returned):
        meaning = " ".join(comment_above(line, comments))
        if meaning or not rows:
            rows.append((names, meaning))
        else:
            rows[-1][0].extend(names)
    lines = [f"| {', '.join(f'`{n}`' for n in names)} | {cell(text)} |" for names, text in rows]
    return "\n".join(["| key | value |", "| --- | --- |", *lines])


def dict_keys(node: ast.Dict) -> Iterator[tuple[list[str], int]]:
    """The keys of a dict, each with its line; those of a dict that is unpacked in it, too."""
    for key, value in zip(node.keys, node.values, strict=True):
        inner = [key] if key else [k for n in ast.walk(value) for k in keys_within(n)]
        if names := [name for k in inner if (name := key_name(k))]:
            yield names, (key or value).lineno


def keys_within(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.DictComp):
        return [node.key]
    return [key for key in node.keys if key] if isinstance(node, ast.Dict) else []


def key_name(key: ast.expr) -> str:
    """The name of a key; N stands for what an f-string fills in."""
    if isinstance(key, ast.JoinedStr):
        return "".join(str(p.value) if isinstance(p, ast.Constant) else "N" for p in key.values)
    return str(key.value) if isinstance(key, ast.Constant) else ""


def comment_above(line: int, comments: dict[int, str]) -> list[str]:
    first = line
    while first - 1 in comments:
        first -= 1
    return [comments[number] for number in range(first, line)]


def exit_codes(_: str) -> str:
    """The exit code of each class of errors that has one of its own."""
    found = {
        error.exit_code: inspect.getdoc(error) or ""
        for _, error in inspect.getmembers(ashl.errors, inspect.isclass)
        if "exit_code" in vars(error)
    }
    rows = [f"| {code} | {cell(text)} |" for code, text in sorted(found.items())]
    return "\n".join(["| code | meaning |", "| --- | --- |", *rows])


def codec_support(_: str) -> str:
    from tests.cli.test_compression_table import table

    return table()


def support_matrix(_: str) -> str:
    from tests.support_matrix import lines

    return "\n".join(lines())


SOURCES: dict[str, Callable[[str], str]] = {
    "conf": option_tables,
    "cards": cards,
    "names": method_names,
    "csv": result_table,
    "help": command_help,
    "record": record_fields,
    "errors": exit_codes,
    "codecs": codec_support,
    "checks": support_matrix,
}
SLOW = {"checks"}  # takes minutes


def written(text: str, slow: bool = False) -> str:
    """The page with its generated parts as the program has them now."""

    def part(found: re.Match[str]) -> str:
        if found[2] in SLOW and not slow:
            return found[0]
        return f"{found[1]}\n{SOURCES[found[2]](found[3])}\n\n{found[4]}"

    return GENERATED.sub(part, text)


if __name__ == "__main__":
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        if (after := written(before, slow=True)) != before:
            page.write_text(after, encoding="utf-8")
            print(page.relative_to(ROOT))
