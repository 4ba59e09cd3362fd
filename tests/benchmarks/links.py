"""Overlap on real links: `python -m tests.benchmarks.links`, as root.

Two ranks, each in a network namespace of its own, joined by a pair of interfaces shaped both ways.
`ashl profile` first measures steps and links; from that profile merges are planned and iterations
predicted. Then every option and torch's DistributedDataParallel train the same model in turn, one
thread each; start-up counts for neither.
"""

import argparse
import json
import signal
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

from ashl.config.compose import compose
from tests.benchmarks.table import alternate, ratio, show
from tests.benchmarks.torch_ddp import WORKERS
from tests.engines import free_port
from tests.namespaces import job, machines, missing

IMAGES = ("dataset=synthetic", "dataset.num_train=2560", "dataset.num_test=10")
MODELS = {
    "resnet20": ("model=resnet20", "dataset.batch_size=32"),
    "wide cnn": ("model=cnn", "model.channels=[64,128,256,512]", "dataset.batch_size=64"),
}
OPTIONS = {
    "none": ("overlap=none",),
    "wfbp": ("overlap=wfbp",),
    "merged greedy": ("overlap=merged", "overlap.plan=greedy"),
    "merged optimal": ("overlap=merged", "overlap.plan=optimal"),
    "priority": ("overlap=priority",),
    "dear": ("overlap=dear",),
    "delayed": ("overlap=delayed",),
}
CAPS_MB = (0.25, 1, 4)  # of DDP's buckets, beside its default
BASE = (
    "topology=all_reduce",
    "sync=bsp",
    "runtime=torchrun",
    "cluster=real",
    "tracking=none",
    "tracking.events=none",
    "eval.every_commits=1000000000",
    "optimizer.lr=0.001",
    *IMAGES,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, help="one of them alone")
    parser.add_argument("--mbit-s", type=float, nargs="+", default=[200, 500, 1000])
    parser.add_argument(
        "--options", nargs="+", choices=OPTIONS, default=list(OPTIONS), help="beside none"
    )
    parser.add_argument("--steps", type=int, default=60, help="of each worker, after a warm-up")
    parser.add_argument("--turns", type=int, default=5)
    asked = parser.parse_args()
    if why := missing():
        sys.exit(f"not run: {why}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # with the namespaces taken away
    for model in [asked.model] if asked.model else MODELS:
        for mbit_s in asked.mbit_s:  # each takes minutes, so it is shown at once
            study = Study(model, mbit_s, asked.steps)
            rows = study.rows(asked.options, asked.turns)
            show(
                f"{model} at {mbit_s:g} Mbit/s: an iteration of two ranks in namespaces of"
                " their own",
                ["", "ms", "/ none", "DDP /", "best DDP /", "predicted / ms"],
                rows,
                f"medians of {asked.turns} turns; ratios are taken within a turn: median"
                f" (quartiles); best DDP: of the bucket sizes {', '.join(map(str, CAPS_MB))} MiB;"
                f" sums beside computing: {study.beside}",
            )


@dataclass
class Study:
    """A model over a link."""

    model: str
    mbit_s: float
    steps: int
    machines: list[str] = field(default_factory=list)
    place: Path = Path()
    jobs: int = 0
    beside: dict[str, float] | None = None
    predicted_ms: dict[str, float] = field(default_factory=dict)

    def rows(self, options: list[str], turns: int) -> list[list[str]]:
        with (
            tempfile.TemporaryDirectory() as folder,
            machines(self.mbit_s, self.mbit_s) as self.machines,
        ):
            self.place = Path(folder)
            with_server = [*self.machines, self.machines[0]]
            profile = (
                self.ashl("profile", "topology=parameter_server", machines=with_server)
                / "profile.json"
            )
            self.beside = json.loads(profile.read_text())["contention"]
            chosen = dict.fromkeys(["none", *options])
            contestants = {name: partial(self.ours, name, f"profile={profile}") for name in chosen}
            contestants |= {"DDP": partial(self.ddp, None)}
            contestants |= {f"DDP, {cap} MiB": partial(self.ddp, cap) for cap in CAPS_MB}
            found = alternate(contestants, turns)
        best = min(
            (name for name in found if name.startswith("DDP,")),
            key=lambda name: statistics.median(found[name]),
        )
        return [self.row(name, found, best) for name in (*chosen, "DDP", best)]

    def row(self, name: str, found: dict[str, list[float]], best: str) -> list[str]:
        ms, said = statistics.median(found[name]), self.predicted_ms.get(name)
        return [
            name,
            f"{ms:.1f}",
            ratio(found[name], found["none"]),
            ratio(found["DDP"], found[name]),
            ratio(found[best], found[name]),
            f"{said / ms:.2f}" if said else "",
        ]

    @property
    def overrides(self) -> list[str]:
        return [*BASE, *MODELS[self.model]]

    @cached_property
    def config(self) -> dict:
        return compose(self.overrides, None)

    def ms(self, samples_per_s: float) -> float:
        return 1e3 * WORKERS * self.config["dataset"]["batch_size"] / samples_per_s

    def job(self, machines: list[str], *command: str) -> tuple[Path, str]:
        """Run it, a rank on each of these; returns the folder of their folders, and what rank 0
        printed.
        """
        self.jobs += 1
        folder = self.place / str(self.jobs)
        return folder, job(machines, free_port(), [sys.executable, "-m", *command], folder)[0]

    def ashl(self, command: str, *overrides: str, machines: list[str] | None = None) -> Path:
        """The folder of the run, which lies with the rank that records."""
        given = ("ashl.cli", command, *self.overrides, *overrides, "run.dir=run", "--quiet")
        folder, _ = self.job(machines or self.machines, *given)
        return next(folder.glob("*/run"))

    def ours(self, name: str, profile: str) -> float:
        run = self.ashl("train", profile, f"stop.steps={WORKERS * self.steps}", *OPTIONS[name])
        said = json.loads((run / "plan.json").read_text())["stages"][0]["predicted_steps_per_s"]
        if said:
            self.predicted_ms[name] = 1e3 * WORKERS / said
        return self.ms(json.loads((run / "summary.json").read_text())["samples_per_s"])

    def ddp(self, cap: float | None) -> float:
        """Train with DDP buckets of this many MiB, or torch's default."""
        config = self.place / "config.json"
        config.write_text(json.dumps(self.config))
        printed = self.job(
            self.machines, "tests.benchmarks.torch_ddp", str(config), str(self.steps), str(cap or 0)
        )[1]
        return self.ms(float(printed.split()[-1]))


if __name__ == "__main__":
    main()
