"""Check the project's prose: docstrings, comments, messages, YAML comments and Markdown pages.

`python -m tests.prose [PATH...]` prints one finding a line, `file:line: kind: rule: excerpt`, and
exits with 1 if there is one. Without a path it reads the whole project. `tests/test_prose.py`
asserts that there is no finding. Text between backticks, in code blocks, in formulae and in
quotation marks is not prose.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_WORDS = 25  # words in a sentence
CODE_FOLDERS = ("ashl", "cli", "tests", "examples")
PAGES = ("README.md", "CONTRIBUTING.md", "docs")

# what can fail
MEMBER = r"(?:workers?|ranks?|members?|partners?|process(?:es)?|peers?|machines?|servers?|who)"

# Words that a reader outside the project cannot understand, or that have a standard term: pattern,
# advice.
WORDS = (
    (r"anew", "again, new"),
    (r"alike", "identical, the same"),
    (r"befalls?|befell", "happens to; an injected fault"),
    (r"of a sudden", "suddenly"),
    (r"but for(?! example)", "except"),
    (r"at hand", "available"),
    (r"turn(?:s|ed)? about", "interleaved, in turn"),
    (r"what came out", "results"),
    (r"(?:go|goes|going|went|gone) on without", "continues without, tolerates the failure of"),
    (r"com(?:e|es|ing) back|came back", "rejoins, returns"),
    (
        (
            r"(?:those|ranks|workers|members) (?:who|that|which) (?:are|were) left|who"
            r" (?:is|are|was|were) left"
        ),
        "survivors, remaining workers",
    ),
    (r"st(?:and|ands|ood|anding) still", "is paused, hangs"),
    (r"f(?:all|alls|ell|allen) silent", "misses heartbeats"),
    (r"(?:take|takes|taken|took) up again", "resumed"),
    (r"gone on from|go(?:es)? on from", "resumed from"),
    (r"(?:say|says|said) (?:it |them )?again", "retransmits, repeats"),
    (r"ha(?:s|ve|d) no say", "has no effect, is ignored"),
    (r"(?:ride|rides|riding|rode|ridden) along|riders?|ridden", "piggybacked"),
    (r"(?:come|comes|came) to nothing", "is aborted"),
    (r"hand(?:s|ed|ing)? (?:in|out|over)", "push, emit, transfer"),
    (r"at (?:their|its|his) own pace", "asynchronously"),
    (r"(?:knock|knocks|knocked|knocking)", "join request"),
    (r"(?:at|through|behind) the doors?|doors?", "join endpoint"),
    (r"let(?:s|ting)? (?:it |them |her |him |everything |everyone )?in(?= |\.|,|;)", "admit"),
    (r"newcomers?", "joining worker"),
    (
        r"(?:is|are|was|were|be|been|still) (?:under way|on (?:its|their) way)|under way",
        "in flight, in progress",
    ),
    (
        (
            r"(?:machine|rank|node|run|process|everyone|nobody) (?:of|from) (?:the"
            r" )?house|houses?|rooms?(?! for)"
        ),
        "package, subpackage",
    ),
    (r"desks?", "controller, control channel"),
    (r"last word|the word of", "final signal, control signal"),
    (r"so often", "every N …"),
    (r"as often as", "once per …"),
    (r"whoever|whichever|whatever", "name the actor"),
    (r"whereof|whereby|wherein|thereof|hence", "so, therefore"),
    (
        rf"{MEMBER} (?:is|are|was|were|has been|have been) lost"
        rf"|los(?:e|es|ing) (?:a|the|one|its) {MEMBER}|lost {MEMBER}",
        "fails, failed",
    ),
    (rf"{MEMBER} (?:is|are|was|were|has|have) gone(?! through)", "failed, exited"),
    (r"call(?:s|ed|ing)? in", "drained"),
    (r"gives? way to", "transitions to"),
    (r"borders? (?:of|between) (?:a |the )?stages?|stage(?:'s)? borders?", "stage boundary"),
    (r"kept shares?|share (?:that is )?kept", "density"),
    (r"turned up", "appeared"),
    (r"for want of", "without"),
    (r"in vain", "without result"),
    (r"ladders?", "decay stage"),
    (r"comes? to stand|came to stand", "is placed"),
    (r"by (?:itself|themselves) alone|all alone", "alone"),
    (r"nought|naught", "zero"),
    (r"a body|bodies|body", "payload"),
    (r"hears?(?: of| from)?|heard(?: of| from)?", "receives, is notified"),
    (r"stranger(?:s)?", "untrusted client, unknown name"),
)
PLAIN_WORDS = tuple(
    (re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE), pattern, advice) for pattern, advice in WORDS
)

SAY_AS_EXAMPLE = re.compile(r"(?:, say\b(?=[,.;:)]|$)|\(say\b|(?<!to )\bsay\))", re.IGNORECASE)
POOR_START = re.compile(
    r"(?:Whose|Whom|Of whom|What|Who|Whether|How|Which|Those|Theirs|The same, but|The same as"
    r"|Of what|Of which|To whom|With what|…|\.\.\.)(?:\b|\s|$)"
)
DOCSTRING_START = re.compile(
    r"(?:Of|For|With|By|At|On|From|To|As|Into|Without|Between|Among|Beside|Until|Till|Since|And|Or|But|So)\b"
)
QUESTION = re.compile(r"\?\s*$")
RELATIVE_START = re.compile(r"(?:^|(?<=[;:,] ))(?:who|whose|whom)\b")


PARAGRAPH_END = re.compile(
    r"\n\s*\n|\n\s*(?:[-*•|]|\d+[.)])\s+"
    r"|\n(?=\s*(?:[A-Z]\w*(?: \w+)?|Args|Returns|Raises|Rule|Limits|Source|Differs):\s)"
)


@dataclass(frozen=True)
class Text:
    """A piece of prose, where it begins, and what it is: docstring, comment, message, yaml
    or page.
    """

    file: str
    line: int
    kind: str
    body: str


def plain(body: str) -> str:
    """Return the prose of a text without links and tags.

    Code between backticks, a list of such codes, and quoted words become one word each.
    """
    body = re.sub(r"``.+?``|`[^`]*`", "CODE", body, flags=re.DOTALL)
    body = re.sub(r'"[^"\n]{0,80}"|“[^”\n]{0,80}”', "QUOTE", body)
    body = re.sub(r"CODE(?:,\s+CODE)+(?:,?\s+(?:and|or)\s+CODE)?", "CODE", body)
    body = re.sub(r"https?://\S+", "LINK", body)
    body = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", body)
    return re.sub(r"<[^>\n]+>", "", body)


def sentences(body: str) -> Iterator[str]:
    """Yield the sentences of a text; a blank line, a line of a list or table, `:`, and `;` end one,
    too.
    """
    paragraphs = re.split(PARAGRAPH_END, body)
    for paragraph in paragraphs:
        text = " ".join(paragraph.split())
        for sentence in re.split(r"(?<=[.!?;:])\s+(?=\S)|\s\|\s", text):
            if sentence.strip():
                yield sentence.strip()


def count_words(sentence: str) -> int:
    return sum(bool(re.search(r"[A-Za-z]{2}", word)) for word in sentence.split())


def is_formula(sentence: str) -> bool:
    return bool(re.search(r"[←Σ∑‖√≤≥∈≈·]|\w\^|_\{|= ?[\w(]+ ?[*/+]", sentence))


def find_faults(text: Text) -> Iterator[str]:
    """Yield `rule: excerpt` for each fault of a text."""
    body = plain(text.body)
    flat = " ".join(body.split())
    for pattern, _, advice in PLAIN_WORDS:
        for match in pattern.finditer(flat):
            yield (
                f"say {advice!r} for {match.group(0)!r}:"
                f" {flat[max(0, match.start() - 40) : match.end() + 40]}"
            )
    if match := SAY_AS_EXAMPLE.search(flat):
        yield f"'say' for 'for example': {flat[max(0, match.start() - 40) : match.end() + 20]}"
    parts = list(sentences(body))
    if text.kind == "docstring" and parts:
        if DOCSTRING_START.match(parts[0]):
            yield f"a docstring begins with a verb or a noun: {parts[0][:80]}"
        if re.match(r"[a-z]", parts[0]) and not parts[0].startswith("CODE"):
            yield f"a docstring begins with an upper-case letter: {parts[0][:80]}"
    for sentence in parts:
        if (POOR_START.match(sentence) and not QUESTION.search(sentence)) or RELATIVE_START.search(
            sentence
        ):
            yield f"name the actor: {sentence[:80]}"
        if (words := count_words(sentence)) > MOST_WORDS and not is_formula(sentence):
            yield f"{words} words in a sentence (at most {MOST_WORDS}): {sentence[:80]}"


def read_python(path: Path, file: str) -> Iterator[Text]:
    """Yield docstrings, comments and messages of a Python file."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if (found := ast.get_docstring(node)) is not None:
                yield Text(file, node.body[0].lineno, "docstring", found)
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            yield from read_message(node.exc.args[0], file)
        elif isinstance(node, ast.keyword) and node.arg == "help":
            yield from read_message(node.value, file)
    yield from read_comments(source, file)


def read_message(node: ast.expr, file: str) -> Iterator[Text]:
    """Yield the constant words of a string or an f-string, with CODE for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield Text(file, node.lineno, "message", node.value)
    if isinstance(node, ast.JoinedStr):
        words = (part.value if isinstance(part, ast.Constant) else "CODE" for part in node.values)
        yield Text(file, node.lineno, "message", "".join(str(word) for word in words))


def read_comments(source: str, file: str) -> Iterator[Text]:
    """Yield comments; comments on lines that follow each other are one text."""
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or re.match(
            r"#(?:!|:| ?(?:type|noqa|ty|pragma|fmt)\b)", token.string
        ):
            continue
        alone = not token.line[: token.start[1]].strip()
        if block and alone and token.start[0] == last + 1:
            block.append(token.string.lstrip("#"))
        else:
            if block:
                yield Text(file, first, "comment", "\n".join(block))
            block, first = [token.string.lstrip("#")], token.start[0]
        last = token.start[0]
    if block:
        yield Text(file, first, "comment", "\n".join(block))


def read_yaml(path: Path, file: str) -> Iterator[Text]:
    """Yield the comments of a YAML file."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if match := re.search(r"(?:^|\s)#\s?(.*)$", line):
            yield Text(file, number, "yaml", match.group(1))


def read_page(path: Path, file: str) -> Iterator[Text]:
    """Yield the paragraphs, items and table cells of a Markdown page.

    Code blocks and generated parts are left out; the sources of generated parts are checked instead.
    """
    block: list[str] = []
    first = 0
    fenced = generated = False
    for number, line in enumerate([*path.read_text(encoding="utf-8").splitlines(), ""], 1):
        generated = line.startswith("<!-- from ") or (generated and line != "<!-- end -->")
        if generated or line == "<!-- end -->":
            line = ""
        if line.lstrip().startswith("```"):
            fenced = not fenced
            line = ""
        starts = bool(re.match(r"\s*(?:[-*|#>]|\d+\.)\s?", line))
        if fenced or not line.strip() or starts:
            if block:
                yield Text(file, first, "page", "\n".join(block))
            block = []
        if not fenced and line.strip():
            first = first if block else number
            block.append(re.sub(r"^\s*(?:[-*#>]+|\d+\.)\s", "", line).replace("|", " | "))


def read_texts(paths: list[Path]) -> Iterator[Text]:
    """Yield every text of the files and folders of `paths`."""
    for path in paths:
        for found in sorted(path.rglob("*")) if path.is_dir() else [path]:
            file = found.resolve().relative_to(ROOT).as_posix()
            if found.suffix == ".py":
                yield from read_python(found, file)
            elif found.suffix == ".yaml":
                yield from read_yaml(found, file)
            elif found.suffix == ".md":
                yield from read_page(found, file)


def find_all(paths: list[Path]) -> list[str]:
    """Return every finding as `file:line: kind: rule: excerpt`."""
    return [
        f"{text.file}:{text.line}: {text.kind}: {fault}"
        for text in read_texts(paths)
        for fault in find_faults(text)
    ]


def main() -> None:
    paths = [Path(name) for name in sys.argv[1:]] or [
        ROOT / name for name in (*CODE_FOLDERS, "conf", *PAGES)
    ]
    findings = find_all([path for path in paths if path.exists()])
    print("\n".join(findings))
    print(f"{len(findings)} findings", file=sys.stderr)
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
