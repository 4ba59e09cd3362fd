"""The typed command line, for reports and for the commands that a command recommends next."""

import os
import shlex
from typing import Any  # a context: of Typer or of Click, by its version

import typer

from ashl.config.override import CommandLine

# options without an effect on results
WITHOUT_EFFECT_ON_RESULTS = ("debug", "quiet", "json", "cfg", "dry_run")
CONFIG_DIR, CONFIG_FILE = "config_dir", "config_file"
# environment variable of the ranks: the typed `ashl launch`, up to the command that they run
TYPED_LAUNCH = "ASHL_LAUNCHED"


def typed_command(ctx: typer.Context) -> CommandLine:
    """Return the command of this context. Its options come first: some shells' completion needs
    that.
    """
    config_dir = ctx.params.get(CONFIG_DIR)
    before = shlex.split(os.environ.get(TYPED_LAUNCH, "")) or ["ashl"]
    if ctx.parent is not None and ctx.parent.info_name == "launch":
        before = launch_words(ctx.parent)
    words = [str(ctx.info_name), *option_words(ctx), *argument_words(ctx)]
    return CommandLine(tuple(words), None if config_dir is None else str(config_dir), tuple(before))


def launch_words(ctx: Any) -> list[str]:
    """Return the typed words of `ashl launch`, up to the command that it runs."""
    return ["ashl", "launch", *option_words(ctx), "--"]


def option_words(ctx: Any) -> list[str]:
    """Return the given options, except --config-dir and --config.

    `CommandLine` has the folder of --config-dir; the settings of --config are among the arguments.
    """
    words: list[str] = []
    for parameter in ctx.command.params:
        name, value = parameter.name, ctx.params.get(parameter.name or "")
        if (
            name is None
            or parameter.param_type_name != "option"
            or name in (*WITHOUT_EFFECT_ON_RESULTS, CONFIG_DIR, CONFIG_FILE)
            or not is_typed(ctx, name)
        ):
            continue
        option = max(map(str, parameter.opts), key=len)
        if isinstance(value, bool):
            words += [option] if value else []
            continue
        for one in value if isinstance(value, list | tuple) else [value]:
            words += [option, str(one)]
    return words


def argument_words(ctx: Any) -> list[str]:
    """Return the given arguments."""
    words: list[str] = []
    for parameter in ctx.command.params:
        if parameter.param_type_name == "argument" and parameter.name:
            value = ctx.params.get(parameter.name)
            words += (
                map(str, value)
                if isinstance(value, list | tuple)
                else []
                if value is None
                else [str(value)]
            )
    return words


def is_typed(ctx: Any, name: str) -> bool:
    """Return True if the command line, and not a default, has set a parameter."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name not in ("DEFAULT", "DEFAULT_MAP")
