"""Group runs into settings: runs that differ in their seed only, and the keys that vary."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from ashl.config.override import key_of
from ashl.errors import plain
from ashl.report.records import Run, Study, written

# Keys that change no outcome, and the seed.
NOT_AXES = ("seed", "name", "run", "tracking", "eval", "allow_targets")


@dataclass(frozen=True, eq=False)
class Replicates:
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
        return plain(self.name() or str(self.runs[0].summary.get("name") or "run"))

    def name(self, without: Container[str] = ()) -> str:
        """Return its name; with `without`, the name lacks these axes."""
        rest = label({key: value for key, value in self.own.items() if key not in without})
        return " ".join(filter(None, [self.title, rest]))

    def by_seed(self) -> dict[tuple[int, int], Run]:
        """Return the runs whose outcome is known, by seed and by number among the runs of that
        seed.
        """
        found: dict[tuple[int, int], Run] = {}
        for run in self.runs:
            if run.counts:
                found[run.seed, sum(seed == run.seed for seed, _ in found)] = run
        return found


def settings_of(study: Study) -> tuple[tuple[str, ...], tuple[Replicates, ...]]:
    """Return the axes, in the order of writing, and the settings, in the order of the grid.

    The axes of a sweep are in its record. The axes of other runs are the keys in which they differ.
    """
    if study.sweep is not None:
        # The settings of a sweep include those that a race dropped.
        planned = [setting.get("axes") or {} for setting in study.sweep["settings"]]
        keys = [str(key) for key in study.sweep.get("axes") or () if str(key) not in NOT_AXES]
        axes = tuple(key for key in keys if len({str(values.get(key)) for values in planned}) > 1)
        chosen = {
            run: {key: run.axes[key] for key in axes if key in run.axes} for run in study.runs
        }
    else:
        keys = differing([run.config for run in study.runs])
        chosen = {
            run: {key: written(run.config[key]) for key in keys if varied(key, run, study.runs)}
            for run in study.runs
        }
        axes = tuple(
            key for key in keys if len({values.get(key) for values in chosen.values()}) > 1
        )
    alike: dict[tuple[str | None, ...], list[Run]] = {}
    for run, values in chosen.items():
        alike.setdefault((run.label, *(values.get(key) for key in axes)), []).append(run)
    found = []
    for (title, *values), runs in alike.items():
        line = [others for of, *others in alike if of == title]
        own = [
            not title or any(others[place] != value for others in line)
            for place, value in enumerate(values)
        ]
        known = [
            (key, value, mine)
            for key, value, mine in zip(axes, values, own, strict=True)
            if value is not None
        ]
        axis = {key: value for key, value, _ in known}
        found.append(
            Replicates(
                title or "", axis, {key: value for key, value, mine in known if mine}, tuple(runs)
            )
        )
    return axes, tuple(found)


def common_to(study: Study) -> str:
    """Return what all runs share, which no label repeats: model, data, cluster, and other typed
    keys.
    """
    names = {
        key: {str(run.config.get(key)) for run in study.runs} - {"None"}
        for key in ("model", "dataset", "cluster")
    }
    one = {key: found.pop() for key, found in names.items() if len(found) == 1}
    words = [" on ".join(one[key] for key in ("model", "dataset") if key in one)]
    words += [f"cluster {one['cluster']}"] if "cluster" in one else []
    kinds = {str(run.summary.get("time_kind")) for run in study.runs}
    words += (
        ["virtual time"]
        if kinds == {"virtual"}
        else ["real processes"]
        if kinds == {"wall"}
        else []
    )
    typed = [
        str(text) for text in (study.sweep or {}).get("overrides") or () if is_setting(str(text))
    ]
    covered = {*one, "runtime", *NOT_AXES, *((study.sweep or {}).get("axes") or ())}
    words += [text for text in typed if not {key_of(text), key_of(text).split(".")[0]} & covered]
    return ", ".join(filter(None, words))


def is_setting(text: str) -> bool:
    """Return True for KEY=VALUE, False for flags, their values and keys of a sweeper or
    launcher.
    """
    return "=" in text and not text.startswith(("-", "hydra.", "hydra/"))


def varied(key: str, run: Run, runs: Sequence[Run]) -> bool:
    """Return True if the run has this key and another run of the same option has another value
    for it.
    """
    group = key.split(".")[0]
    alike = [
        other.config
        for other in runs
        if group == key or other.config.get(group) == run.config.get(group)
    ]
    return key in run.config and len({str(config.get(key)) for config in alike}) > 1


def label(axes: Mapping[str, str]) -> str:
    """Return a setting's name: options as words, other values as `key=value`.

    A single-stage schedule is left out next to a sync mode, and compression=none next to any other
    key.
    """
    mute = {("schedule", "single")} if "sync" in axes else set()
    mute |= {("compression", "none")} if len(axes) > 1 else set()
    axes = {key: value for key, value in axes.items() if (key, value) not in mute} or axes
    last = [key.rpartition(".")[2] for key in axes]
    short = {key: key if last.count(end) > 1 else end for key, end in zip(axes, last, strict=True)}
    return " ".join(
        value if "." not in key else f"{short[key]}={value}" for key, value in axes.items()
    )


def differing(configs: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the keys in which configurations differ, groups first.

    A parameter of a group counts if it differs between runs of the same option. Of keys that differ
    in the same way (an option brings another one along), the first is enough. A schedule is named
    although it determines its sync modes.
    """
    every = list(dict.fromkeys(key for config in configs for key in config))
    every = [key for key in every if key.split(".")[0] not in NOT_AXES]
    kept: list[str] = []
    partitions: set[tuple[int, ...]] = set()
    for key in sorted(every, key=lambda key: ("." in key, key not in ("sync", "schedule"))):
        group = key.split(".")[0]
        pairs = {
            (config.get(group) if group != key else None, str(config.get(key)))
            for config in configs
        }
        if len(pairs) == len({option for option, _ in pairs}):
            continue
        values = [str(config.get(key)) for config in configs]
        partition = tuple(values.index(value) for value in values)
        if partition not in partitions or key == "schedule":
            partitions.add(partition)
            kept.append(key)
    return kept
