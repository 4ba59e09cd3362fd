"""Group runs into settings: runs that differ in their seed only, named by the keys that vary."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ashl.config.flat import setting_text
from ashl.config.override import group_of, key_of
from ashl.errors import UsageError, to_one_line
from ashl.report.records import Run, Study

# Keys that change no outcome, and the seed.
NOT_AXES = ("seed", "name", "run", "tracking", "eval", "allow_targets")
ALWAYS_NAMED = ("schedule", "cluster", "model", "dataset")
MAX_NAMED = 8  # settings that an error message lists

Configs = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, eq=False)
class Setting:
    """Runs that are equal except for their seed.

    `axes` has the value of each axis that the setting has. `title` is the label of its line of the
    sweep, which stands for all axes except `own`, those that vary in the line.
    """

    title: str
    axes: Mapping[str, str]
    own: Mapping[str, str]
    runs: tuple[Run, ...]

    @property
    def label(self) -> str:
        return to_one_line(self.name() or str(self.runs[0].summary.get("name") or "run"))

    def name(self, without: Container[str] = ()) -> str:
        """Return its name without these axes."""
        rest = label_of({key: value for key, value in self.own.items() if key not in without})
        return " ".join(filter(None, [self.title, rest]))

    def by_seed(self) -> dict[tuple[int, int], Run]:
        """Return the runs whose outcome is known, by seed and by number among those of the seed."""
        found: dict[tuple[int, int], Run] = {}
        for run in self.runs:
            if run.has_known_outcome:
                found[run.seed, sum(seed == run.seed for seed, _ in found)] = run
        return found


def settings_of(study: Study) -> tuple[tuple[str, ...], tuple[Setting, ...]]:
    """Return the axes, in the order of writing, and the settings, in the order of the grid.

    The axes of a sweep are in its record, with the settings that a race dropped. The axes of other
    runs are the keys in which they differ.
    """
    if study.sweep is not None:
        keys = [str(key) for key in study.sweep.get("axes") or () if str(key) not in NOT_AXES]
        planned = [setting.get("axes") or {} for setting in study.sweep["settings"]]
        chosen = {run: run.axes for run in study.runs}
    else:
        configs = [run.config for run in study.runs]
        keys = differing_keys(configs)
        chosen = {
            run: {
                key: setting_text(run.config[key])
                for key in keys
                if varies(key, run.config, configs)
            }
            for run in study.runs
        }
        planned = list(chosen.values())
    axes = tuple(key for key in keys if len({str(values.get(key)) for values in planned}) > 1)
    lines: dict[str, dict[tuple[str | None, ...], list[Run]]] = {}
    for run, values in chosen.items():
        line = lines.setdefault(run.label, {})
        line.setdefault(tuple(values.get(key) for key in axes), []).append(run)
    settings = []
    for title, line in lines.items():
        columns = zip(axes, zip(*line, strict=True), strict=True)
        varying = {axis for axis, values in columns if not title or len(set(values)) > 1}
        for values, runs in line.items():
            pairs = zip(axes, values, strict=True)
            known = {axis: value for axis, value in pairs if value is not None}
            own = {axis: value for axis, value in known.items() if axis in varying}
            settings.append(Setting(title, known, own, tuple(runs)))
    return axes, tuple(sorted(settings, key=lambda setting: study.runs.index(setting.runs[0])))


def varies(key: str, config: Mapping[str, Any], configs: Configs) -> bool:
    """Return True if a configuration has this key, and another one with the same option of its
    group has another value.
    """
    group = key.split(".")[0]
    alike = [other for other in configs if group == key or other.get(group) == config.get(group)]
    return key in config and len({str(other.get(key)) for other in alike}) > 1


def differing_keys(configs: Configs) -> list[str]:
    """Return the keys in which configurations differ, groups first.

    Of keys that differ in the same way (an option brings another one along), the first is enough. A
    schedule is named although it determines its sync modes; so are a task and a cluster, because
    methods are compared on one of them.
    """
    every = dict.fromkeys(key for config in configs for key in config)
    keys = [key for key in every if key.split(".")[0] not in NOT_AXES]
    kept: list[str] = []
    partitions: set[tuple[int, ...]] = set()
    for key in sorted(keys, key=lambda key: ("." in key, key not in ("sync", "schedule"))):
        group, values = key.split(".")[0], [str(config.get(key)) for config in configs]
        options = [config.get(group) if group != key else None for config in configs]
        partition = tuple(values.index(value) for value in values)
        varying = len(set(zip(options, values, strict=True))) > len(set(options))
        if varying and (partition not in partitions or key in ALWAYS_NAMED):
            partitions.add(partition)
            kept.append(key)
    return kept


def common_settings(study: Study) -> str:
    """Return what all runs share: model, data, cluster, kind of time, and other typed keys."""
    names = {
        key: {str(run.config.get(key)) for run in study.runs} - {"None"}
        for key in ("model", "dataset", "cluster")
    }
    one = {key: found.pop() for key, found in names.items() if len(found) == 1}
    words = [" on ".join(one[key] for key in ("model", "dataset") if key in one)]
    words += [f"cluster {one['cluster']}"] if "cluster" in one else []
    kinds = {run.summary.get("time_kind") for run in study.runs}
    clock = kinds.pop() if len(kinds) == 1 else None
    words.append({"virtual": "virtual time", "wall": "real processes"}.get(str(clock), ""))
    sweep = study.sweep or {}
    covered = {*one, "runtime", *NOT_AXES, *(sweep.get("axes") or ())}
    for text in map(str, sweep.get("overrides") or ()):
        if not {key_of(text), group_of(text)} & covered:
            words.append(text)
    return ", ".join(filter(None, words))


def label_of(axes: Mapping[str, str]) -> str:
    """Return a setting's name: options as words, other values as `key=value`.

    A single-stage schedule is left out next to a sync mode, and compression=none next to any other
    key.
    """
    mute = {("schedule", "single")} if "sync" in axes else set()
    mute |= {("compression", "none")} if len(axes) > 1 else set()
    shown = {key: value for key, value in axes.items() if (key, value) not in mute} or axes
    last = [key.rpartition(".")[2] for key in shown]
    names = [key if last.count(end) > 1 else end for key, end in zip(shown, last, strict=True)]
    return " ".join(
        value if "." not in key else f"{name}={value}"
        for (key, value), name in zip(shown.items(), names, strict=True)
    )


def usual_baseline(grid: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the index of the setting that others are compared with if none is named.

    It is the first BSP, without compression if there is one.

    Args: grid has the options of each setting by group.

    >>> usual_baseline([{"sync": "asp"}, {"sync": "bsp", "compression": "topk"}, {"sync": "bsp"}])
    2
    """
    bsp = [
        (options.get("compression", "none") != "none", place)
        for place, options in enumerate(grid)
        if options.get("sync") == "bsp" and options.get("schedule", "single") == "single"
    ]
    return min(bsp)[1] if bsp else None


def find_label(settings: Mapping[str, Mapping[str, str]], name: str) -> str:
    """Return the label that a name means: the label itself, or the only label that has these parts.

    Raises: UsageError if no label or several match.
    """
    if name in settings:
        return name
    wanted, found = set(name.replace(",", " ").split()), []
    for known, axes in settings.items():
        pairs = {f"{part}={axes[key]}" for key in axes for part in (key, key.rpartition(".")[2])}
        if wanted and wanted <= {*known.split(), *axes.values(), *pairs}:
            found.append(known)
    if len(found) == 1:
        return found[0]
    labels = found or list(settings)
    listed = "; ".join(labels[:MAX_NAMED]) + ("; ..." if len(labels) > MAX_NAMED else "")
    problem = f"is the name of {len(found)} settings" if found else "is no setting"
    raise UsageError(f'--baseline "{name}" {problem}; name one of: {listed}.')
