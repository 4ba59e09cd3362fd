"""What was varied, and the runs that differ in their seed only: one setting."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from ashl.config.override import key_of
from ashl.errors import plain
from ashl.report.records import Run, Study, written

NOT_AXES = (
    "seed",
    "name",
    "run",
    "tracking",
    "eval",
    "allow_targets",
)  # what changes no outcome, and the seed


@dataclass(frozen=True, eq=False)
class Replicates:
    """Runs that are equal in all but their seed. `axes`: the value of each axis, where the setting
    has it; `title`: what its line of the sweep is called, which then stands for all but the `own`
    axes, those that vary in the line.
    """

    title: str
    axes: Mapping[str, str]
    own: Mapping[str, str]
    runs: tuple[Run, ...]

    @property
    def label(self) -> str:
        return plain(self.name() or str(self.runs[0].summary.get("name") or "run"))

    def name(self, without: Container[str] = ()) -> str:
        """Its name, or what is left of it without some of the axes."""
        rest = label({key: value for key, value in self.own.items() if key not in without})
        return " ".join(filter(None, [self.title, rest]))

    def by_seed(self) -> dict[tuple[int, int], Run]:
        """Its runs whose outcome is known, by seed; the second run of a seed has 1 as its other
        number, and so on.
        """
        found: dict[tuple[int, int], Run] = {}
        for run in self.runs:
            if run.counts:
                found[run.seed, sum(seed == run.seed for seed, _ in found)] = run
        return found


def settings_of(study: Study) -> tuple[tuple[str, ...], tuple[Replicates, ...]]:
    """The axes, in the order of writing, and the settings, in the order of the grid.

    A sweep knows its own axes; for other runs they are what differs between their configurations.
    """
    if study.sweep is not None:
        planned = [
            setting.get("axes") or {} for setting in study.sweep["settings"]
        ]  # those that were dropped too
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
    """What all runs share, said once and in no label: model, data and cluster, and what else was
    typed for all.
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
    """Return True for KEY=VALUE, False for a flag, its value and the settings of a sweeper or a
    launcher.
    """
    return "=" in text and not text.startswith(("-", "hydra.", "hydra/"))


def varied(key: str, run: Run, runs: Sequence[Run]) -> bool:
    """Whether a run has this key, and another run of the same option has another value for it."""
    group = key.split(".")[0]
    alike = [
        other.config
        for other in runs
        if group == key or other.config.get(group) == run.config.get(group)
    ]
    return key in run.config and len({str(config.get(key)) for config in alike}) > 1


def label(axes: Mapping[str, str]) -> str:
    """A setting's name: options by themselves, other values behind the last part of their key. What
    goes without saying is left out: that a named sync mode holds for the whole run, and a
    compression that is off.
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
    """The keys in which configurations differ, groups first.

    A parameter of a group counts where it differs between runs of the same option. Of keys that
    differ in the same way (an option brings another one along), the first is enough; a schedule is
    named though it brings its sync modes.
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
