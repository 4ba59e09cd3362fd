"""Judge a race while its runs write: read their metrics, drop settings, and name runs that need
not run.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ashl.config.identity import config_hash
from ashl.study.grid import Setting, label
from ashl.study.race import Course, verdicts
from ashl.study.slots import by_itself, read_summary
from ashl.tracking import jsonl
from ashl.tracking.recorder import METRICS


class Race:
    """The state of a race in a folder.

    Args: dropped is the list of `sweep.json`: settings that an earlier race in this folder dropped
    stay dropped; stays is the label of the setting that the others are compared with; seeds is the
    number of seeds that each setting will have, if the grid does not contain all of them yet.
    """

    def __init__(
        self,
        settings: Sequence[Setting],
        folder: Path,
        dropped: list[dict[str, Any]],
        stays: str,
        say: Callable[[str], None],
        seeds: int = 1,
    ) -> None:
        self.dropped, self.say = dropped, say
        self.gone = {str(entry["hash"]) for entry in dropped}  # hashes of runs that need not run
        self.teams: dict[str, list[Setting]] = {}
        for setting in settings:
            self.teams.setdefault(config_hash({**setting.config, "seed": 0}), []).append(setting)
        self.stays = {
            name for name, team in self.teams.items() if label(team[0], without="seed") == stays
        }
        self.stays |= {
            name
            for name, team in self.teams.items()
            if any(setting.hash in self.gone for setting in team)
        }
        self.seeds = max(seeds, *map(len, self.teams.values()))
        self.seen = {
            setting.hash: Seen(folder / setting.hash, setting.config) for setting in settings
        }
        self.longest_s = max(setting.predicted_s or 0.0 for setting in settings)

    @property
    def order(self) -> list[Setting]:
        """The runs in their order: seed by seed, the baseline first.

        So the baseline's result with a seed is known before the others run with it.
        """
        teams = sorted(self.teams.items(), key=lambda item: item[0] not in self.stays)
        return [team[k] for k in range(self.seeds) for _, team in teams if k < len(team)]

    def judge(self) -> None:
        """Read the progress of all runs, and drop the settings that it rules out."""
        courses = {digest: seen.course() for digest, seen in self.seen.items()}
        over = {digest for digest, course in courses.items() if course and course.ended}
        field = {
            name: {s.config["seed"]: course for s in team if (course := courses[s.hash])}
            for name, team in self.teams.items()
        }
        horizon_s = self.longest_s or max(
            (course.now_s for course in courses.values() if course), default=0.0
        )
        done = {
            name
            for name, team in self.teams.items()
            if all(setting.hash in over for setting in team)
        }
        for name, (at_s, reason) in verdicts(
            field, horizon_s, self.seeds, self.stays | done
        ).items():
            for setting in self.teams[name]:
                if setting.hash not in over:
                    entry = {
                        "hash": setting.hash,
                        "at_s": at_s if courses[setting.hash] else 0.0,
                        "reason": reason,
                    }
                    self.dropped.append(entry)
                    self.gone.add(setting.hash)
            self.stays.add(name)
            self.say(f"dropped {label(self.teams[name][0], without='seed')}: {reason}")


class Seen:
    """A reader of the metrics of a run that may still be writing them."""

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self.path, self.read = path, 0
        self.loss = "test/loss" if config["stop"]["target_loss"] is None else "train/loss"
        self.times: list[float] = []
        self.losses: list[float] = []
        self.last: Course | None = None

    def course(self) -> Course | None:
        """Read the new metrics and return the progress of the run; None if it has not begun."""
        if self.last and self.last.ended:
            return self.last
        if not self.path.exists():
            return None
        summary = read_summary(self.path)
        rows, self.read = jsonl.tail(self.path / METRICS, self.read)
        for row in rows:
            loss = row.get(self.loss)
            self.times.append(row["time_s"])
            self.losses.append(math.inf if loss is None else loss)
        ended = summary is not None and by_itself(summary)
        failed = summary is not None and ended and summary["status"] != "finished"
        reached_s = summary.get("time_to_target_s") if summary else None
        self.last = Course(self.times, self.losses, reached_s, ended, failed)
        return self.last
