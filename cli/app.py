"""The command line: its commands, its errors and its exit codes.

No heavy library is imported before a command runs, so that `ashl --help` answers at once.
"""

import errno
import logging
import os
import re
import shlex
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Protocol, runtime_checkable

import typer
from typer.core import TyperCommand, TyperGroup

from ashl import __version__
from ashl.config.catalog import (
    default_keys,
    defaults,
    nearest_key,
    nearest_name,
    suggestion_text,
)
from ashl.config.override import command_text
from ashl.errors import NO_PLACE, AshlError, InterruptError, UsageError, to_one_line
from ashl.run.process_setup import standard_streams

from .advise import advise
from .answer import print_error, run_and_print
from .backtest import backtest
from .calibrate import calibrate
from .compare import compare
from .demo import demo
from .doctor import doctor
from .export import export
from .join import join
from .launch import launch
from .list import show_options
from .profile import profile
from .replay import replay
from .sweep import sweep
from .train import train
from .ui import ui
from .watch import watch


@runtime_checkable
class TyperUsageError(Protocol):
    """The interface of Typer's usage errors, which have no public class in some of its versions."""

    def format_message(self) -> str: ...


@runtime_checkable
class UnknownOptionError(TyperUsageError, Protocol):
    """Typer's error about an unknown option."""

    ctx: typer.Context
    option_name: str
    possibilities: Sequence[str] | None


def plain_flags(params: list[Any]) -> list[Any]:
    """Remove the type of flags, which take no value, from the help."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


class Command(TyperCommand):
    """A command whose help shows flags without a type, and whose answer is printed."""

    def get_params(self, ctx: Any) -> list[Any]:
        return plain_flags(super().get_params(ctx))

    def invoke(self, ctx: Any) -> int:
        return run_and_print(partial(super().invoke, ctx), as_json=bool(ctx.params.get("json")))


class Group(TyperGroup):
    """The root command; its help shows flags without a type."""

    def get_params(self, ctx: Any) -> list[Any]:
        return plain_flags(super().get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            kept = map(str, interrupt.args)
            raise InterruptError("; ".join(["interrupted", *kept])) from interrupt


app = typer.Typer(
    cls=Group,
    help=(
        "Which sync mode, topology, compression and schedule trains fastest on my unequal machines?"
    ),
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS = {
    "demo": demo,
    "train": train,
    "profile": profile,
    "sweep": sweep,
    "launch": launch,
    "calibrate": calibrate,
    "backtest": backtest,
    "join": join,
    "watch": watch,
    "advise": advise,
    "replay": replay,
    "compare": compare,
    "export": export,
    "list": show_options,
    "ui": ui,
    "doctor": doctor,
}
for name, command in COMMANDS.items():
    # each paragraph on one line: Typer would keep the line ends of the source, at any width
    paragraphs = [" ".join(text.split()) for text in (command.__doc__ or "").split("\n\n")]
    about = "\n\n".join(paragraphs)
    app.command(name, cls=Command, short_help=paragraphs[0], help=about)(command)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"ashl {__version__}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
]


@app.callback()
def _root(version: Version = False) -> None:
    pass


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 success, 1 failure, 2 usage, 3 data missing, 130
    interrupted.

    An error is one sentence on standard error; `--debug` shows the traceback, too.
    """
    # else torch prints stack frames before the sentence
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    # else matplotlib prints two paragraphs if the home folder is read-only
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    with standard_streams():
        return _report_errors([*(sys.argv[1:] if argv is None else argv)] or ["--help"])


def _report_errors(args: list[str]) -> int:
    try:
        code = _run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("ashl: interrupted", file=sys.stderr)
        print_error(args, "interrupted", InterruptError.exit_code)
        return InterruptError.exit_code
    except Exception as error:
        if "--debug" in args:
            traceback.print_exc()
        sentence, code = to_one_line(_error_sentence(error)), _exit_code(error)
        print(f"ashl: {sentence}", file=sys.stderr)
        print_error(args, sentence, code)
        return code
    finally:
        _flush_output()


def _run(args: list[str]) -> int:
    if "=" in args[0] and not args[0].startswith("-"):
        raise UsageError(f"{args[0]} is no command; write `{command_text('train', *args)}`.")
    try:
        return app(args, prog_name="ashl", standalone_mode=False) or 0
    except typer.Abort as abort:  # Typer raises it for every EOFError
        raise abort.__cause__ or abort from None
    except Exception as error:
        if not isinstance(error, TyperUsageError):
            raise
        raise UsageError(_usage_message(error, args)) from error


def _usage_message(error: TyperUsageError, args: Sequence[str]) -> str:
    """Return Typer's usage error as one sentence with the fix."""
    command = args[0]
    text = " ".join(error.format_message().split()).rstrip(".")
    # pydantic's wording of a wrong number
    text = re.sub(r"Input (should be .*), unable to.*", r"it \1", text)
    hint = "; `ashl --help` shows what there is."
    if text.startswith("No such command"):
        return f"There is no command {command}{suggestion_text(command, COMMANDS, hint)}"
    if isinstance(error, UnknownOptionError) and text.startswith("No such option"):
        option = error.option_name
        word = option.lstrip("-").replace("-", "_")
        keys = default_keys()
        is_key = word.partition(".")[0] in {key.partition(".")[0] for key in keys}
        names = () if is_key else error.possibilities or ()
        near = nearest_name(word, {name.lstrip("-").replace("-", "_") for name in names})
        takes_settings = any(one.name == "overrides" for one in error.ctx.command.params)
        if near:
            hint = f"; did you mean --{near.replace('_', '-')}?"
        elif takes_settings and (key := word if is_key else nearest_key(word, keys)):
            hint = f"; settings are written without dashes, as in {_as_setting(option, key, args)}."
        else:
            hint = f"; `ashl {command} --help` shows what there is."
        return f"There is no option {option}{hint}"
    if command in COMMANDS:
        hint = f"; `ashl {command} --help` shows what there is."
    return text + hint


def _as_setting(option: str, key: str, args: Sequence[str]) -> str:
    """Return KEY=VALUE for a setting that was typed as an option, quoted for a shell."""
    word = next((word for word in args if word.partition("=")[0] == option), option)
    _, equals, value = word.partition("=")
    if not equals and word in args:
        value = next(iter(args[args.index(word) + 1 :]), "")
        value = "" if value.startswith("-") or "=" in value else value
    return shlex.quote(f"{key}={value or defaults().get(key, 1)}")


def _exit_code(error: Exception) -> int:
    """Return the exit code of an error: 2 for a path that cannot be one, as for other usage."""
    if isinstance(error, OSError) and error.filename and error.errno in NO_PLACE:
        return UsageError.exit_code
    return getattr(error, "exit_code", AshlError.exit_code)


def _error_sentence(error: Exception) -> str:
    if isinstance(error, AshlError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        if error.filename and is_full:
            reason = error.strerror.lower()
            return f"{error.filename} cannot be written ({reason}); free some space."
        if error.filename and error.errno in NO_PLACE:
            return f"{error.filename} cannot be used ({error.strerror.lower()}); name another path."
        fix = "; free some space." if is_full else "."
        return error.strerror + (f": {error.filename}" if error.filename else "") + fix
    return (
        f"{type(error).__name__}: {' '.join(str(error).split())}; this is a bug in ashl, --debug"
        " shows where."
    )


def _flush_output() -> None:
    """Flush standard output; if that fails, send the rest to /dev/null.

    Python would print an error about it at exit otherwise.
    """
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
