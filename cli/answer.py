"""The answer of a command: tables for a person, or one JSON document for a program."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from ashl.errors import AshlError, to_one_line

JSON = "--json"
Json = Annotated[
    bool,
    typer.Option(JSON, help="Print one JSON document; all else goes to standard error."),
]


def show_nothing() -> None:
    """Print no tables: the command has printed them while it ran, or was told to be quiet."""


@dataclass(frozen=True)
class Answer:
    """The answer of a command.

    Args: document is printed with `--json`, with `next` and `error` as keys if they are set and it
    is no list; show prints the tables without it; next is the command to type next; error is a
    sentence on standard error after the answer, which makes the exit code 1.
    """

    document: Mapping[str, Any] | Sequence[Any]
    show: Callable[[], None] = show_nothing
    next: str = ""
    error: str = ""
    code: int = 0


def run_and_print(run: Callable[[], Answer | int | None], as_json: bool) -> int:
    """Run a command, print its answer, and return the exit code.

    With `as_json` all that the command prints goes to standard error, and the document to standard
    output.
    """
    if not as_json:
        found = run()
    else:
        with redirect_stdout(sys.stderr):
            found = run()
    if not isinstance(found, Answer):
        return found or 0
    if as_json:
        print_json(with_next_command(found))
    else:
        found.show()
        if found.next:
            print(f"next: {found.next}")
    sys.stdout.flush()
    if found.error:
        print(f"ashl: {to_one_line(found.error)}", file=sys.stderr)
        return AshlError.exit_code
    return found.code


def with_next_command(found: Answer) -> Mapping[str, Any] | Sequence[Any]:
    """Return the document of an answer, with the next command and the error."""
    if not isinstance(found.document, Mapping):
        return found.document
    more = {"next": found.next, "error": found.error}
    return {**found.document, **{key: text for key, text in more.items() if text}}


def print_error(args: Sequence[str], sentence: str, code: int) -> None:
    """Print the document of a command that failed, if the user asked for one."""
    if JSON in args:
        with suppress(OSError):  # standard output itself may be what failed
            print_json({"error": sentence, "exit_code": code})


def print_json(document: Mapping[str, Any] | Sequence[Any]) -> None:
    """Print a document as JSON; NaN and infinities, for which JSON has no literal, become null."""
    from ashl.tracking.jsonl import dumps

    print(dumps(document, indent=2))
