"""Compose a configuration from KEY=VALUE settings, by Hydra, into one plain dict.

A composition with set values is compared with one of the same options without them. A key that the
latter lacks does not exist, whether it was mistyped on the command line, forced with `++` or
written in a preset.
"""

import re
import shlex
from collections.abc import Container, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import (
    GrammarParseError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from ashl.config.catalog import (
    CONF,
    MAX_NAMES,
    Catalog,
    catalog,
    check_keys,
    load_yaml,
    nearest_key,
    parameters,
    parents,
    read_text,
    unknown_name_error,
)
from ashl.config.construct import import_target
from ashl.config.flat import PRESETS
from ashl.config.override import command_line, group_of, key_of
from ashl.config.workers import resize_cluster
from ashl.errors import UnusedKeyError, UsageError

LINKS = (
    "bandwidth_mbit_s",
    "latency_s",
    "server_bandwidth_mbit_s",
    "intra_node_bandwidth_mbit_s",
    "intra_node_latency_s",
)
CHOOSERS = (*PRESETS, "dataset", "schedule")  # groups whose options may choose those of others
MAX_VALUES = 10_000  # maximum number of values of one key in a sweep

# Hydra 1.3 warns without version_base, Hydra 1.4 warns with it.
VERSION_BASE = (
    {"version_base": "1.3"} if tuple(map(int, hydra.__version__.split(".")[:2])) < (1, 4) else {}
)


def compose(overrides: Sequence[str] = (), config_dir: Path | None = None) -> dict:
    """Return the whole configuration as a plain dict.

    It has the chosen option of every group with its `_target_`, and resolved interpolations. Its
    first key is `choices`, the name of each group's option (of presets, if one was chosen). The
    sync mode is not among them if the schedule sets that of each stage.

    Args: `config_dir` has options of the user's own, in addition to the shipped ones.
    A leading `+` or `++` is ignored. A setting of sync without one of the schedule implies
    `schedule=single`.
    Raises: UsageError, one sentence, for a setting that does not exist or cannot be read.
    """
    known = catalog(config_dir)
    named = {key_of(text) for text in overrides}
    if any(key.partition(".")[0] == "sync" for key in named) and "schedule" not in named:
        overrides = [*overrides, "schedule=single"]
    changes = [_parse_change(text, known, config_dir) for text in overrides]
    last = {
        change.key_or_group: change.value() for change in changes if change.key_or_group in known
    }
    groups = tuple(
        f"{group}={option}" for group, option in sorted(last.items()) if option is not None
    )
    values = [change for change in changes if change.key_or_group not in known]
    keys = [change.key_or_group for change in values]
    for key in keys:
        if config_dir and (config_dir / key).is_dir():
            raise unknown_name_error("group", key, known)
    with _convert_errors(known, config_dir or CONF):
        chosen, choices = _compose(groups, config_dir, known)
        config = _set_values(chosen, values)
        presets = [group for group in PRESETS if group in choices]
        source = "".join(f"{group}={choices[group]}: " for group in presets)
        if presets:
            own = tuple(f"{g}={o}" for g, o in choices.items() if g not in PRESETS)
            chosen, _ = _compose(own, config_dir, known)
        before = None
        if values or presets:
            unchanged = _to_dict(chosen)
            if unknown := next(_unknown_keys(_to_dict(config), unchanged), None):
                typed = any(unknown.startswith(key) for key in [*keys, *presets])
                raise _unknown_key_error(
                    unknown, unchanged, choices, known, "" if typed else source
                )
            before = unchanged.get("cluster")
        plain = _to_dict(config, resolve=True)
    _check_allowed(plain, named, source)
    _check_groups(plain, choices, known)
    plain["cluster"] = _resize_cluster(plain["cluster"], before, keys, choices, known, config_dir)
    mute = "sync" if _names_sync(plain) else None
    return {
        "choices": {group: choices[group] for group in known if group in choices and group != mute},
        **plain,
    }


def _check_allowed(plain: Mapping, named: Container[str], source: str) -> None:
    """Refuse `allow_targets` that is not a list, or that the user did not type.

    Raises: UsageError.
    """
    if not isinstance(plain["allow_targets"], list):
        raise UsageError(
            f"allow_targets={plain['allow_targets']} is not a list; write it like"
            " 'allow_targets=[mypackage]'"
        )
    if plain["allow_targets"] and "allow_targets" not in named:
        raise UsageError(
            f"{source}a file cannot allow code to be imported; {fix_for_allow_targets(plain)}"
        )


def _check_groups(plain: Mapping, choices: Mapping[str, str], known: Catalog) -> None:
    """Refuse an option file whose content is not a mapping. Raises: UsageError."""
    for group, option in choices.items():
        if group not in PRESETS and not isinstance(plain.get(group), dict):
            raise UsageError(
                f"{known[group][option]} must hold keys and values, for example `_target_:"
                " mypackage.MyClass`"
            )


def _resize_cluster(
    cluster: dict,
    before: Mapping | None,
    keys: Sequence[str],
    choices: Mapping[str, str],
    known: Catalog,
    config_dir: Path | None,
) -> dict:
    """Return the cluster's spec with lists for its number of workers.

    Args: `before` is the cluster without set values, or None if no value was set.
    Raises: UsageError.
    """
    written = {key.removeprefix("cluster.") for key in keys if key.startswith("cluster.")}
    changed = {key for key, value in cluster.items() if before and value != before.get(key)}
    if config_dir and "exchange_s" not in written and cluster.get("exchange_s") is not None:
        _refuse_hidden_links(
            [known[g][choices[g]] for g in (*PRESETS, "cluster") if choices.get(g)]
        )
    return resize_cluster(cluster, (written, changed))


def specs_of(
    group: str, names: Sequence[str], overrides: Sequence[str], config_dir: Path | None
) -> list[dict]:
    """Return the specs of these options of a group, with all other settings as given.

    Settings of keys of the group are left out.
    Raises: UsageError.
    """
    others = [text for text in overrides if group_of(text) != group]
    return [compose([*others, f"{group}={name}"], config_dir)[group] for name in names]


def _names_sync(config: Mapping) -> bool:
    """Return True if the schedule sets the sync mode of each stage.

    Planning reports a faulty schedule.
    """
    with suppress(UsageError):
        schedule = import_target(
            config["schedule"].get("_target_", ""), "schedule", config["allow_targets"]
        )
        return bool(getattr(schedule, "names_sync", False))
    return False


def fix_for_allow_targets(config: Mapping) -> str:
    """Return the fix for a file that sets `allow_targets`: only the command line may."""
    packages = str(config["allow_targets"]).replace("'", "").replace(" ", "")
    return f"if you trust it, type 'allow_targets={packages}' on the command line"


@contextmanager
def _convert_errors(known: Catalog, folder: Path) -> Generator[None]:
    """Convert errors of Hydra, OmegaConf and YAML to UsageError."""
    try:
        yield
    except (RecursionError, yaml.YAMLError, UnicodeDecodeError) as error:
        for file in chain.from_iterable(options.values() for options in known.values()):
            check_keys(file)  # raises an error that names the file
        raise UsageError(f"A file in {folder} cannot be read: {message_of(error)}") from error
    except MissingConfigException as error:  # an option that a preset names
        group, _, option = str(error.missing_cfg_file or "").partition("/")
        raise (
            unknown_name_error(group, option, known[group])
            if group in known
            else UsageError(message_of(error))
        ) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(message_of(error)) from error
    except ValueError as error:  # YAML reads a name in a `defaults` list as a number or a boolean
        for file in chain.from_iterable(options.values() for options in known.values()):
            check_keys(file)  # raises an error that names the file, for example for a date
        raise UsageError(
            f"A `defaults` list of a file in {folder} names an option that is not text:"
            f" {message_of(error)}"
        ) from error


def _compose(
    options: tuple[str, ...], config_dir: Path | None, known: Catalog
) -> tuple[DictConfig, dict[str, str]]:
    """Return the composition of these options, and the final option of each group.

    Shipped options never change: they are composed once for all settings of a sweep that differ
    only in values.
    """
    if config_dir is None:
        return _compose_shipped(options)
    return _assemble(options, config_dir, known)


@lru_cache(maxsize=256)
def _compose_shipped(options: tuple[str, ...]) -> tuple[DictConfig, dict[str, str]]:
    return _assemble(options, None, catalog())


def _assemble(
    options: tuple[str, ...], config_dir: Path | None, known: Catalog
) -> tuple[DictConfig, dict[str, str]]:
    """Assemble a composition from the files of its options.

    Hydra composes the options that may choose options of other groups, and takes most of the time.
    Each of the others is the content of its file. With a preset, or such an option of the user's
    own, Hydra composes all of them.
    """
    choices = dict(option.split("=", 1) for option in options)
    files = {group: known[group][option] for group, option in choices.items()}
    loaded = {
        group: values
        for group, file in files.items()
        if group not in CHOOSERS
        and (values := _load_option(file, file.stat().st_mtime_ns)) is not None
    }
    others = [group for group in choices if group not in loaded]
    all_shipped = all(files[group].parent.parent == CONF for group in others)
    if not loaded or not all_shipped or not choices.keys().isdisjoint(PRESETS):
        return _compose_by_hydra(options, config_dir)
    shipped, chosen = _compose_shipped(tuple(f"{group}={choices[group]}" for group in others))
    config = deepcopy(shipped)
    for group, values in loaded.items():
        check_keys(files[group])
        config[group] = values
    return config, chosen | choices


@lru_cache(maxsize=1024)
def _load_option(file: Path, changed_ns: int) -> DictConfig | None:
    """Return the values of an option's file, merged with those of the options that it starts from,
    as Hydra merges them; None for a file that only Hydra can compose.

    Args: `changed_ns` is the time of its last change.
    """
    if re.search("@|_global_|override", read_text(file)):
        return None
    values = OmegaConf.load(file)
    if not isinstance(values, DictConfig) or not values:
        return None
    names = values.pop("defaults", ListConfig([]))
    if not isinstance(names, ListConfig) or any("/" in str(name) for name in names):
        return None
    bases = [_load_option(base, base.stat().st_mtime_ns) for base in parents(file)]
    if len(bases) != len(names) or None in bases:
        return None
    merged = OmegaConf.merge(*(base for base in bases if base is not None), values)
    assert isinstance(merged, DictConfig)
    return merged


def _set_values(config: DictConfig, values: Sequence[Override]) -> DictConfig:
    """Return the configuration with these values set, as Hydra sets values with `++`."""
    changed = deepcopy(config)
    for change in values:
        value = change.value()
        merge = isinstance(value, Mapping)
        try:
            OmegaConf.update(changed, change.key_or_group, value, merge=merge, force_add=True)
        except GrammarParseError:  # a broken ${...}: `message_of` has its sentence
            raise
        except (OmegaConfBaseException, ValueError, TypeError) as error:
            raise UsageError(
                f"{change.input_line} cannot be set: a list or a single value is there, not keys;"
                " write it whole, as in 'cluster.compute=[1,2]'"
            ) from error
    return changed


def _compose_by_hydra(
    options: Sequence[str], config_dir: Path | None
) -> tuple[DictConfig, dict[str, str]]:
    """Return one composition by Hydra, and the final option of each group."""
    path = str(config_dir.resolve()).replace("\\", "\\\\").replace("'", "\\'") if config_dir else ""
    search = [f"hydra.searchpath=['file://{path}']"] if config_dir else []
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(CONF), **VERSION_BASE):
            config = hydra.compose("config", [*options, *search], return_hydra_config=True)
    finally:
        GlobalHydra.instance().clear()
    choices = {
        str(group): str(option) for group, option in config.hydra.runtime.choices.items() if option
    }
    own = {group: option for group, option in choices.items() if not group.startswith("hydra/")}
    for group, option in own.items():
        places = [root / group / f"{option}.yaml" for root in (config_dir, CONF) if root]
        for file in [file for file in places if file.is_file()][:1]:
            check_keys(file)
    return OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"]), own


def _to_dict(config: DictConfig, *, resolve: bool = False) -> dict:
    plain = OmegaConf.to_container(config, resolve=resolve, throw_on_missing=resolve)
    assert isinstance(plain, dict)
    return plain


def _parse_change(text: str, known: Catalog, config_dir: Path | None) -> Override:
    """Return one parsed override.

    Raises: UsageError unless it is a single change of one key.
    """
    change = parse_override(text, known)
    key, _, value = text.lstrip("+~").partition("=")
    if change.is_delete():
        raise UsageError(
            f"{text}: a key cannot be taken away; give it another value, or null if it is optional"
        )
    if key.split(".")[0] == "hydra" or "/" in key or "@" in key:
        fix = "; options of your own are found with --config-dir" if "searchpath" in key else ""
        raise UsageError(f"{text}: Hydra's own settings and packages are not used here{fix}.")
    if key.split(".")[0] == "sweep":
        raise UsageError(
            f"{text}: lines of a sweep stand in a preset; here give values, as in sync=bsp,asp."
        )
    if change.is_sweep_override():
        brackets = (
            f", or write a list as '{key}=[{value}]'"
            if "(" not in value and key not in known
            else ""
        )
        sweep = command_line("sweep", [text], config_dir)
        raise UsageError(
            f"{text} gives several values where train takes one; use `{sweep}`{brackets}."
        )
    typed = change.value()
    if isinstance(typed, Mapping) and "???" in typed.values():
        # Merging would leave the key out.
        raise UsageError(f"{text}: ??? stands for a missing value; give it one, or null")
    if (
        key in known
        and str(change.value()) not in known[key]
        and not (value == "null" and key in PRESETS)
    ):
        raise unknown_name_error(key, value, known[key])
    return change


def alternatives(text: str, config_dir: Path | None = None) -> list[str]:
    """Return the single changes of one override of a sweep: `a,b`, `choice()`, `range()` and
    `glob()` in Hydra's grammar.

    Raises: UsageError for values that do not exist, cannot be read, or have no end.
    """
    known = catalog(config_dir)
    change = parse_override(text, known)
    if change.is_delete() or not change.is_sweep_override():
        _parse_change(text, known, config_dir)
        return [text]
    key = text.partition("=")[0]
    if not change.is_discrete_sweep():
        raise UsageError(
            f"{text} has no end of values; list some, as in {key}=0.1,0.2, or search them with"
            " --search 20"
        )
    if isinstance(found := change.value(), Glob):
        if key not in known:
            raise UsageError(
                f"{text}: glob() chooses among a group's options, and {key} is no group; list its"
                " values."
            )
        values = found.filter(list(known[key]))
    else:
        values = list(islice(change.sweep_string_iterator(), MAX_VALUES + 1))
        if len(values) > MAX_VALUES:
            raise UsageError(
                f"{text} stands for more than {MAX_VALUES:,} values; give fewer, or a larger step."
            )
    if not values and key not in known:
        raise UsageError(f"{text} stands for no value; list some, as in {key}=1,2.")
    if not values:
        raise UsageError(f"{text} matches nothing; `ashl list {key}` shows what there is.")
    singles = [f"{key}={value}" for value in values]
    for single in singles:
        _parse_change(single, known, config_dir)
    return singles


class Axis(NamedTuple):
    """A key with several values: listed ones, or all numbers of an interval."""

    key: str
    singles: tuple[str, ...]  # its alternatives; of an interval, its two ends
    ends: tuple[float, float] | None = None  # None for listed values
    log: bool = False  # True if the interval is searched on a logarithmic scale
    ordered: bool = False  # True for the listed values of a `range()`


def axis_of(text: str, config_dir: Path | None) -> Axis:
    """Return the values of one override of a search; one alternative for a single value.

    Raises: UsageError for values that do not exist or cannot be read, and for an empty interval.
    """
    change = parse_override(text, catalog(config_dir))
    key = key_of(text)
    if change.is_delete():
        return Axis(key, tuple(alternatives(text, config_dir)))
    found = change.value()
    if not isinstance(found, IntervalSweep):
        singles = tuple(alternatives(text, config_dir))
        ordered = isinstance(found, RangeSweep) and not found.shuffle
        return Axis(key, singles, ordered=ordered)
    low, high, log = found.start, found.end, "log" in found.tags
    if low is None or high is None or low >= high or (log and low <= 0):
        positive = " with a first end above zero" if log else ""
        raise UsageError(f"{text}: an interval goes from a smaller to a larger number{positive}")
    return Axis(key, (f"{key}={low}", f"{key}={high}"), (low, high), log)


def value_of(text: str) -> Any:
    """Return the value of a setting that is no setting of a run, as Hydra's grammar reads it.

    Raises: UsageError for several values.
    """
    change = parse_override(text, {})
    if change.is_delete() or change.is_sweep_override():
        raise UsageError(f"{text}: one value is needed here")
    return change.value()


def parse_override(text: str, known: Catalog) -> Override:
    """Return a parsed override. Raises: UsageError."""
    key, equals, value = text.partition("=")
    if not all(key.split(".")) or (not equals and not text.startswith("~")):
        group = next((group for group, options in known.items() if text in options), None)
        fix = (
            f"; did you mean {group}={text}?"
            if group
            else ", without blanks around =, as in sync=bsp or seed=1."
        )
        raise UsageError(f"{text!r} is not of the form KEY=VALUE{fix}")
    try:
        return _parse_cached(quote_value(text))
    except HydraException as error:
        if value.endswith(","):  # the shell has ended the setting at a blank
            raise UsageError(
                f"{text} cannot be read: it ends with a comma; write a list without blanks, as in"
                f" '{key}=[1,2]', and values of a sweep as in {key}=1,2"
            ) from error
        twice = shlex.quote(f'{key}="{value}"')
        raise UsageError(
            f"{text} cannot be read: its brackets do not match, a value is missing beside a comma"
            " or in brackets,"
            f" or it has special characters; write a list as '{key}=[1,2]', or quote the value"
            f" twice, as in {twice}."
        ) from error


def quote_value(text: str) -> str:
    """Return an override as Hydra reads it: a value with an apostrophe, which a path may have, is
    quoted.
    """
    key, _, value = text.partition("=")
    if "'" not in value or value[0] in "'\"[{":
        return text
    try:
        _parse_cached(text)
    except HydraException:
        return key + '="' + value.replace('"', '\\"') + '"'
    return text


@lru_cache(maxsize=1024)
def _parse_cached(text: str) -> Override:
    return OverridesParser.create().parse_override(text)


def _refuse_hidden_links(files: Sequence[Path]) -> None:
    """Refuse a file of the user's own that sets links while the file it starts from sets
    `exchange_s`.

    `exchange_s` replaces the links, so they would have no effect. `files` are those of the chosen
    presets and of the chosen cluster; the nearest file that sets `exchange_s` decides.
    Raises: UsageError.
    """
    for file in files:
        said = load_yaml(file)
        said = said if file.parent.name == "cluster" else said.get("cluster") or {}
        if "exchange_s" in said:
            return
        if file.is_relative_to(CONF):
            continue
        if links := [key for key in LINKS if said.get(key) is not None]:
            raise UsageError(
                f"{file}: {links[0]} has no effect, exchange_s of the cluster that this file starts"
                " from replaces the links; add the line `exchange_s: null`"
            )
        if file.parent.name == "cluster":
            _refuse_hidden_links(list(parents(file)))


def _unknown_key_error(
    key: str, reference: Mapping, choices: Mapping[str, str], known: Catalog, source: str = ""
) -> UsageError:
    """Return the error about a key that `reference` lacks: options that have it, or the nearest
    key.
    """
    group, _, rest = key.partition(".")
    if group in PRESETS:
        return UsageError(
            f"{source}{group}/{choices[group]}.yaml must begin with the line `# @package _global_`."
        )
    having = [
        o for o, file in known.get(group, {}).items() if rest in {p.key for p in parameters(file)}
    ]
    if having:
        text = (
            f"{source}{group}={choices.get(group)} has no key {rest}; these have one:"
            f" {', '.join(having)}."
        )
        return UnusedKeyError(text, key)
    keys = [one for one in _keys(reference) if not one.endswith("_target_")]
    named = {
        f"{group}.{parameter.key}": option
        for option, file in known.get(group, {}).items()
        for parameter in parameters(file)
    }
    above = key.rpartition(".")[0]
    if above in keys and not any(one.startswith(f"{above}.") for one in keys):
        return UsageError(f"{source}{above} takes one value, not keys; write {above}=VALUE")
    near = nearest_key(key, [*keys, *named])
    if near:
        fix = f"did you mean {near}{'' if near in keys else f', a key of {group}={named[near]}'}?"
    else:
        fix = _keys_of_group(group, reference, choices)
    return UsageError(f"{source}There is no key {key}; {fix}")


def _keys_of_group(group: str, reference: Mapping, choices: Mapping[str, str]) -> str:
    """Return a phrase with the keys of a group, or the command that lists them."""
    values = reference.get(group)
    names = [name for name in values if name != "_target_"] if isinstance(values, Mapping) else []
    place = f"{group}={choices[group]}" if group in choices else group
    if 0 < len(names) <= MAX_NAMES:
        return f"{place} has {', '.join(names)}."
    shown = f" {group} {choices[group]}" if names and group in choices else ""
    return f"`ashl list{shown}` shows what there is."


def _unknown_keys(config: Mapping, reference: Mapping, prefix: str = "") -> Iterator[str]:
    """Yield dotted keys of `config` that `reference` lacks; its null or empty mapping accepts any
    value.
    """
    for key, value in config.items():
        name, allowed = f"{prefix}{key}", reference.get(key, 0)
        if isinstance(value, Mapping) and value:
            if allowed is not None and allowed != {}:
                yield from _unknown_keys(
                    value, allowed if isinstance(allowed, Mapping) else {}, f"{name}."
                )
        elif key not in reference:
            yield name
        elif isinstance(allowed, Mapping) and allowed and not isinstance(value, Mapping):
            raise UsageError(
                f"{name} is no value but a group of them: {', '.join(_keys(allowed, f'{name}.'))}."
            )


def _keys(config: Mapping, prefix: str = "") -> Iterator[str]:
    for key, value in config.items():
        yield f"{prefix}{key}"
        yield from _keys(value, f"{prefix}{key}.") if isinstance(value, Mapping) else ()


def message_of(error: Exception) -> str:
    """Return the message of Hydra or OmegaConf on one line, without its technical details."""
    text = str(error).split("\n")[0].strip()
    key = error.full_key if isinstance(error, OmegaConfBaseException) else None
    if isinstance(error, MissingMandatoryValue):
        return f"{key}: ??? stands for a missing value; give it one, or null"
    if isinstance(error, InterpolationResolutionError | GrammarParseError):
        return (
            f"{key}: its ${{...}} refers to no value; write a value, or another key as in"
            " '${dataset.batch_size}'"
        )
    return f"{key}: {text}." if key else f"{text.rstrip('.')}."
