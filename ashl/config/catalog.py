"""Catalogue of options: the folders of `conf/` are groups, their files options, the lines of a file
parameters.

It is read without Hydra and without imports of the options' classes, so that completion and `ashl
list` answer at once.
"""

import ast
import importlib.util
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, lru_cache
from importlib.machinery import PathFinder
from itertools import takewhile
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from ashl.errors import UsageError

# libyaml's loader is six times as fast, if it was built
SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
PACKAGE = Path(__file__).resolve().parents[1]
MERGE = "tag:yaml.org,2002:merge"  # YAML's tag of `<<`
RECURSIVE = "found unconstructable recursive node"  # PyYAML's message
CONFIG_DIR = "ASHL_CONFIG_DIR"  # environment variable for --config-dir
# words that Hydra or YAML read as a number, a truth value or null
NOT_TEXT = ("true", "false", "yes", "no", "on", "off", "y", "n", "null", "nan", "inf")
MAX_NAMES = 12  # maximum number of names in a message
MAX_VALUES = 100_000  # maximum number of values of a file
MIN_WORD = 3  # letters of a word that is looked for in longer names
# in an installation, or in a checkout
CONF = next(f for f in (PACKAGE / "conf", PACKAGE.parent / "conf") if f.is_dir())

Catalog = Mapping[str, Mapping[str, Path]]  # group → option → file


@dataclass(frozen=True)
class Parameter:
    """One line of an option's file: a dotted key, its value as written, and its comment."""

    key: str
    value: str
    comment: str


def own_folder(config_dir: str | PathLike[str] | None) -> Path | None:
    """Return the folder of the user's own options: the given one, else that of the environment
    variable.
    """
    found = config_dir or os.environ.get(CONFIG_DIR)
    return Path(found) if found else None


def catalog(config_dir: Path | None = None) -> dict[str, dict[str, Path]]:
    """Return every group with its options, sorted by name, including those of `config_dir`.

    Raises: UsageError if `config_dir` is not a folder, or has a file with a name that is taken or
    cannot be typed.
    """
    if config_dir is not None and not config_dir.is_dir():
        raise UsageError(
            f"--config-dir {config_dir}: there is no such folder; name an existing one"
        )
    found: dict[str, dict[str, Path]] = {}
    for group in defaults():
        options = {file.stem: file for file in (CONF / group).glob("[!_]*.yaml")}
        for file in (config_dir / group).glob("[!_.]*.yaml") if config_dir else ():
            if not file.exists():  # a link that leads nowhere
                continue
            if not file.samefile(options.setdefault(file.stem, file)):
                raise UsageError(
                    f"{file} has the name of an option of ashl's own; rename it, as in"
                    f" my_{file.name}"
                )
            if not is_option_name(file.stem):
                raise UsageError(
                    f"{file}: the name of an option has letters, digits, _ and - only, begins with"
                    " a letter, and is no number or truth value; rename it, as in my_option.yaml"
                )
        found[group] = dict(sorted(options.items()))
    return found


def is_option_name(name: str) -> bool:
    """Return True if Hydra and YAML read a name as text, without quotes."""
    return bool(re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name)) and name.lower() not in NOT_TEXT


@cache
def defaults() -> MappingProxyType[str, str]:
    """Return the default option of each group, in the order of `config.yaml`; "" for an optional
    group.
    """
    entries = [
        entry for entry in load_yaml(CONF / "config.yaml")["defaults"] if isinstance(entry, dict)
    ]
    found = {
        group.removeprefix("optional "): option or ""
        for entry in entries
        for group, option in entry.items()
    }
    return MappingProxyType(found)


def effective_defaults() -> dict[str, str]:
    """Return the options of a run without settings: `defaults`, with the options that the default
    schedule chooses.

    The sync mode is "", because the schedule sets that of each stage.
    """
    found = defaults()
    entries = load_yaml(CONF / "schedule" / f"{found['schedule']}.yaml").get("defaults", ())
    brought = {
        str(key).split("@")[0].removeprefix("override /"): o
        for entry in entries
        for key, o in entry.items()
    }
    return found | brought | {"sync": ""}


def default_keys() -> list[str]:
    """Return the keys of a run without settings: values of no group, groups, and the keys of their
    default options.
    """
    plain = [parameter.key for parameter in parameters(CONF / "config.yaml")]
    of_options = [
        f"{group}.{parameter.key}"
        for group, option in effective_defaults().items()
        if option
        for parameter in parameters(CONF / group / f"{option}.yaml")
    ]
    return [*plain, *defaults(), *of_options]


def parameters(file: Path) -> list[Parameter]:
    """Return the parameters of an option's file, in order, without `_target_` and `defaults`;
    nested keys are dotted.

    A file that starts from another option of its group (`defaults: [mixed]`) also has that option's
    parameters.
    """
    load_yaml(file)  # checks it
    text = read_text(file)
    root = yaml.compose(text, SafeLoader)
    own = list(_leaves(root, "", text.splitlines())) if isinstance(root, yaml.MappingNode) else []
    inherited: dict[str, Parameter] = {}
    for parent in parents(file):
        inherited |= {parameter.key: parameter for parameter in parameters(parent)}
    return list((inherited | {parameter.key: parameter for parameter in own}).values())


def target(file: Path) -> str:
    """Return the dotted name that the option's file constructs; "" for a group of plain values."""
    content = load_yaml(file)
    return str(content.get("_target_", "")) or next(
        (name for parent in parents(file) if (name := target(parent))), ""
    )


def check_keys(file: Path, above: tuple[Path, ...] = ()) -> None:
    """Refuse an option's file, or one that it starts from, with a repeated key, or that starts from
    itself.

    Args: `above` has the files that start from this one.
    Raises: UsageError.
    """
    if file in above:
        raise UsageError(f"{file} starts from itself; correct its `defaults`.")
    _check_keys(file, file.stat().st_mtime_ns, above)


@lru_cache(maxsize=1024)
def _check_keys(file: Path, changed_ns: int, above: tuple[Path, ...]) -> None:
    for parent in find_parents(file):  # loads the file
        check_keys(parent, (*above, file))


def values(file: Path) -> dict:
    """Return the values of an option's file, and of the files that it starts from."""
    found: dict = {}
    for parent in parents(file):
        found |= values(parent)
    return found | {key: value for key, value in load_yaml(file).items() if key != "defaults"}


def docstrings(name: str) -> tuple[str, str]:
    """Return the docstrings of the module and of the class that a `_target_` names, without
    importing them; "" for none.
    """
    module, _, attribute = name.rpartition(".")
    top, *rest = module.split(".")
    spec = (
        importlib.util.find_spec(top) or PathFinder.find_spec(top, [""]) if top else None
    )  # imports nothing
    places = [
        Path(place, *rest) for place in (spec.submodule_search_locations if spec else None) or ()
    ]
    alone = [Path(spec.origin)] if spec and spec.origin and not places else []
    for file in [
        *alone,
        *(file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")),
    ]:
        if file.is_file():
            tree = ast.parse(file.read_text(encoding="utf-8"))
            nodes = (
                n
                for n in tree.body
                if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == attribute
            )
            node = next(nodes, None)
            return ast.get_docstring(tree) or "", (ast.get_docstring(node) or "") if node else ""
    return "", ""


def summary(file: Path) -> str:
    """Return the first paragraph about an option, as one line.

    It is that of the comment at the head of its file, else of the docstring of its module or class.
    """
    text = head_comment(file)
    if not text:
        name = target(file)
        module, attribute = docstrings(name)
        # A method's own module is about it, a shared module about all of its methods.
        is_own = name.split(".")[-2:-1] == [file.stem]
        text = (module or attribute) if is_own else (attribute or module)
    return " ".join(text.partition("\n\n")[0].split())


def card_text(file: Path) -> str:
    """Return the card of an option: the comment at the head of its file, and the docstrings of its
    module and its class.
    """
    name = target(file)
    module, attribute = docstrings(name)
    # a module of one option has its card, if the class has only one line
    own = module and name.split(".")[-2:-1] == [file.stem]
    about = [head_comment(file), module, "" if own and "\n" not in attribute else attribute]
    return "\n\n".join(filter(None, about))


def symbols(group: str) -> str:
    """Return the paragraph of a group's package that explains the symbols of its cards, or ""."""
    package, _ = docstrings(f"ashl.{group}.")
    return next((text for text in package.split("\n\n") if text.startswith("Symbols:")), "")


def head_comment(file: Path) -> str:
    """Return the comment at the head of an option's file."""
    lines = [line for line in read_text(file).splitlines() if "@package" not in line]
    return "\n".join(
        line[1:].strip() for line in takewhile(lambda line: line.startswith("#"), lines)
    )


def count_values(node: yaml.Node, counts: dict[int, int]) -> int:
    """Return the number of values of a node; those of an anchor count at each use of it.

    Args: counts receives the numbers of the nodes below, by identity.
    """
    if id(node) not in counts:
        counts[id(node)] = 1  # found again only below itself: such an anchor is refused later
        parts = node.value if isinstance(node, yaml.CollectionNode) else []
        below = [part[1] if isinstance(part, tuple) else part for part in parts]
        counts[id(node)] = 1 + sum(count_values(part, counts) for part in below)
    return counts[id(node)]


class CheckedLoader(SafeLoader):
    """A loader that refuses a key that a mapping has twice, an anchor that contains itself, and
    anchors that make a small file very large.
    """

    def construct_document(self, node: yaml.Node) -> Any:
        if count_values(node, {}) > MAX_VALUES:
            raise ConstructorError(
                problem=f"its anchors stand for more than {MAX_VALUES:,} values; write fewer",
                problem_mark=node.start_mark,
            )
        self.deep_construct = True  # a recursive node is an error then
        return super().construct_document(node)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Merge the mappings that `<<` names; a key of the mapping's own replaces a merged one.

        Versions of PyYAML differ in which of two merged values they use.
        Raises: ConstructorError for a key that is written twice, or that two merged mappings have.
        """
        written = [pair for pair in node.value if pair[0].tag != MERGE]
        merged = []
        for key, value in node.value:
            if key.tag != MERGE:
                continue
            for part in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                if not isinstance(part, yaml.MappingNode) or part is node:
                    raise ConstructorError(
                        problem="`<<` merges other mappings only", problem_mark=key.start_mark
                    )
                self.flatten_mapping(part)
                merged += part.value
        for pairs, mark in ((written, None), (merged, node.start_mark)):
            names = set[str]()
            for key, _ in pairs:
                if str(key.value) in names:
                    raise ConstructorError(
                        problem=f"{key.value} is twice in one mapping, directly or through `<<`;"
                        " write it once",
                        problem_mark=mark or key.start_mark,
                    )
                names.add(str(key.value))
        node.value = list(
            {str(key.value): (key, value) for key, value in merged + written}.values()
        )


def load_yaml(file: Path) -> dict:
    """Return the content of a YAML file as a dict.

    Raises: UsageError, naming the line, for invalid YAML, an anchor that contains itself, and a key
    that a mapping has twice.
    """
    content = _parse_yaml(lambda text: yaml.load(text, CheckedLoader), read_text(file), file)
    return content if isinstance(content, dict) else {}


def read_text(file: Path) -> str:
    """Return the text of a file of the catalogue. Raises: UsageError."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}; correct the path.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not text in UTF-8; save it as such.") from error


def nearest_name(word: str, known: Iterable[str]) -> str:
    """Return the known name with the most similar spelling, ignoring case; "" if none is
    similar.
    """
    names = {name.casefold(): name for name in known}
    return names.get(next(iter(get_close_matches(word.casefold(), names, n=1, cutoff=0.6)), ""), "")


def nearest_key(key: str, known: Iterable[str]) -> str:
    """Return the dotted key that a user may mean by an unknown one; "" if none is similar.

    Keys of the same group come first, and a group is never proposed for a key of its own. Rules, in
    this order: the last name is equal; it begins with the typed name; one of its words does; the
    spelling is similar.
    """
    group, point, name = key.rpartition(".")
    rest = [one for one in known if not point or one != group]
    siblings = [one for one in rest if point and one.startswith(f"{group}.")]
    last_names = {one: one.rpartition(".")[2] for one in [*siblings, *rest]}
    equal = [one for one, last in last_names.items() if last == name]
    if equal:
        return nearest_name(key, equal) or equal[0]
    if len(name) >= MIN_WORD:
        for begins in (lambda last: [last], lambda last: last.split("_")):
            for one, last in last_names.items():
                if any(word.startswith(name) for word in begins(last)):
                    return one
    if siblings:
        near = nearest_name(name, [last_names[one] for one in siblings])
        return f"{group}.{near}" if near else ""
    return nearest_name(key, rest)


def suggestion_text(word: str, known: Iterable[str], otherwise: str = ".") -> str:
    """Return the end of a message about `word`: `; did you mean NAME?`, or `otherwise` if no known
    name is similar.
    """
    name = nearest_name(word, known)
    return f"; did you mean {name}?" if name else otherwise


def unknown_name_error(kind: str, word: str, known: Iterable[str]) -> UsageError:
    """Return the error about a group, or an option of a group, that does not exist."""
    names, begins = list(known), f"There is no {kind} '{word}'"
    if len(names) <= MAX_NAMES:
        return UsageError(
            f"{begins} among {', '.join(names) or 'none at all'}{suggestion_text(word, names)}"
        )
    shown = f"`ashl list{'' if kind == 'group' else f' {kind}'}` shows what there is."
    return UsageError(
        f"{begins}; "
        + (f"did you mean {near}? {shown}" if (near := nearest_name(word, names)) else shown)
    )


def _parse_yaml(parse, text: str, file: Path):
    try:
        return parse(text)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}" if error.problem_mark else "some line"
        problem = str(error.problem).replace(RECURSIVE, "this anchor contains itself")
        raise UsageError(f"{file}, {line}, is not valid YAML: {problem}.") from error
    except RecursionError as error:
        raise UsageError(f"{file} nests its values too deep; write them flatter.") from error
    except ValueError as error:  # a date that no calendar has, for example
        raise UsageError(f"{file} has a value that YAML cannot read: {error}.") from error


def parents(file: Path) -> Iterator[Path]:
    """Yield the files of the options that an option's file starts from, none of which leads back to
    it.

    Raises: UsageError.
    """
    check_keys(file)
    yield from find_parents(file)


def find_parents(file: Path) -> Iterator[Path]:
    """Yield the files that the `defaults` of an option's file name. Raises UsageError."""
    names = load_yaml(file).get("defaults", [])
    if not isinstance(names, list):
        raise UsageError(f"{file}: `defaults` must be a list, for example `defaults: [_own]`.")
    for entry in names:
        for folder in (CONF / file.parent.name, file.parent):
            if isinstance(entry, str) and (parent := folder / f"{entry}.yaml").is_file():
                yield parent
                break


def _leaves(node: yaml.MappingNode, prefix: str, lines: list[str]) -> Iterator[Parameter]:
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        if name in ("_target_", "defaults"):
            continue
        if isinstance(value, yaml.MappingNode) and not value.flow_style:
            yield from _leaves(value, f"{name}.", lines)
            continue
        first, last = value.start_mark, value.end_mark
        # the comment of a block list is behind its key
        if isinstance(value, yaml.SequenceNode) and not value.flow_style:
            first = last = key.end_mark
        text = lines[first.line][
            first.column : last.column if first.line == last.line else None
        ].strip()
        comment = re.search(
            r"#\s*(.*)$", lines[last.line][last.column :] if last.line < len(lines) else ""
        )
        yield Parameter(name, text or "[...]", comment[1].strip() if comment else "")
