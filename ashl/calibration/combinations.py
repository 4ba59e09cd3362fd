"""What is calibrated: tasks of two sizes, and combinations of sync mode, topology, compression and H that between them
load every part of a cluster."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ashl.config.compose import compose, specs_of
from ashl.config.identity import config_hash
from ashl.config.override import key_of
from ashl.errors import UsageError
from ashl.plan.files import read_profile
from ashl.plan.plan import Plan, Spec
from ashl.planning.make import make_plan
from ashl.study.grid import Setting, alone

TASKS = (("model=mlp", "dataset=digits"), ("model=lenet", "dataset=synthetic", "dataset.shape=[1,28,28]"))
SERVER, RING = "topology=parameter_server", "topology=all_reduce"
COMBINATIONS = {
    "BSP": f"sync=bsp {SERVER} compression=none",
    "BSP Top-K": f"sync=bsp {SERVER} compression=topk",
    "BSP QSGD": f"sync=bsp {SERVER} compression=qsgd",
    "local SGD 4": f"sync=local_sgd sync.local_steps=4 {SERVER} compression=none",
    "SSP": f"sync=ssp {SERVER} compression=none",
    "SSP 4 Top-K": f"sync=ssp sync.local_steps=4 {SERVER} compression=topk",
    "ASP": f"sync=asp {SERVER} compression=none",
    "ASP 4": f"sync=asp sync.local_steps=4 {SERVER} compression=none",
    "ASP Top-K": f"sync=asp {SERVER} compression=topk",
    "BSP ring": f"sync=bsp {RING} compression=none",
    "BSP ring Top-K": f"sync=bsp {RING} compression=topk",
    "local SGD 4 ring": f"sync=local_sgd sync.local_steps=4 {RING} compression=none",
    "D-PSGD": "sync=d_psgd topology=gossip compression=none",
    "Ripples random": "sync=ripples_random topology=partial_all_reduce compression=none",
}
USUAL = (
    "schedule=single",
    "optimizer.lr=0.01",
    "eval.every_commits=1000000000",
)  # where nothing is typed: none in between
KEPT = ("runtime.device", "runtime.threads")  # of what was typed of the runtime, in virtual time
ROUNDS = 12  # of every worker at least
MOST = 50_000  # steps


class LeftOut(NamedTuple):
    """A combination that is not run, or could not be compared, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Pair:
    """One combination: as a real run and as one in virtual time."""

    name: str  # of the combination
    model: str
    real: Setting
    virtual: Setting
    predicted_s: float  # by the plan, from the profile

    @property
    def label(self) -> str:
        return f"{self.model}: {self.name}"


def tasks_of(typed: Sequence[str]) -> list[tuple[str, ...]]:
    """Those of the preset, or the one that was typed."""
    keys = {key_of(text).partition(".")[0] for text in typed}
    if keys & {"model", "dataset", "task", "experiment"}:
        return [()]
    return list(TASKS)


def chosen(typed: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The combinations that agree with what was typed. Raises UsageError where fewer than two do."""
    by_key = {key_of(text): text for text in typed}
    found = {
        name: tuple(text for text in line.split() if text not in typed)
        for name, line in COMBINATIONS.items()
        if all(by_key.get(key_of(text), text) == text for text in line.split())
    }
    if len(found) < 2:
        left = f"only {next(iter(found))}" if found else "nothing"
        raise UsageError(
            f"{left} of what is calibrated goes with {' '.join(typed)}, and an error takes two combinations at least; "
            "drop some of that"
        )
    return found


def codecs_of(found: dict[str, tuple[str, ...]], typed: Sequence[str], config_dir: Path | None) -> list[Spec]:
    """The compressions in them, as specs."""
    return specs_of("compression", codec_names(found), usual(typed), config_dir)


def codec_names(found: dict[str, tuple[str, ...]]) -> list[str]:
    """Those compressions."""
    texts = (text for own in found.values() for text in own if key_of(text) == "compression")
    return [*dict.fromkeys(text.partition("=")[2] for text in texts)]


def usual(typed: Sequence[str]) -> list[str]:
    """What was typed, and what holds where nothing is."""
    keys = {key_of(text) for text in typed}
    return [*(text for text in USUAL if key_of(text) not in keys), *typed]


def pairs_of(
    task: Sequence[str],
    typed: Sequence[str],
    profile: Path,
    seconds: float,
    config_dir: Path | None,
    progress: Callable[[str], None],
    processes: Callable[[dict[str, Any]], int | None] = alone,
) -> tuple[list[Pair], list[LeftOut]]:
    """Every combination of a task, as long as the profile predicts that it takes so many seconds."""
    found, left_out = [], []
    for name, own in chosen(typed).items():
        real = [*usual(typed), *task, *own]
        virtual = [text for text in real if kept(text)]
        virtual += ["runtime=sim", "runtime.gradients=false", "cluster=profile", f"profile={profile}"]
        try:
            progress(name)
            configs = [compose(texts, config_dir) for texts in (real, virtual)]
            plan = make_plan(configs[1])
            steps, predicted_s = length(plan, seconds)
            settings = [setting(name, *of, steps) for of in zip((real, virtual), configs, strict=True)]
            workers = make_plan(settings[0].config, processes(settings[0].config), settings[0].overrides).num_workers
        except UsageError as error:
            left_out.append(LeftOut(name, str(error)))
            continue
        if workers != plan.num_workers:
            raise UsageError(read_profile(str(profile)).crowd(workers))
        found.append(Pair(name, plan.choices["model"], *settings, predicted_s))
    return found, left_out


def kept(text: str) -> bool:
    """Whether it holds in virtual time, too."""
    group = key_of(text).partition(".")[0]
    return group not in ("runtime", "cluster", "profile") or key_of(text) in KEPT


def length(plan: Plan, seconds: float) -> tuple[int, float]:
    """(steps of about so many seconds, whole rounds of all workers; what they take by the plan)."""
    rate = plan.stages[0].predicted_steps_per_s or 1.0
    a_round = sum(worker.local_steps for worker in plan.stages[0].workers)
    steps = a_round * max(ROUNDS, min(MOST, round(rate * seconds)) // a_round)
    return steps, steps / rate


def setting(name: str, texts: Sequence[str], config: dict[str, Any], steps: int) -> Setting:
    """A run of so many steps."""
    config = {**config, "stop": {**config["stop"], "steps": steps}}
    overrides = (*texts, f"stop.steps={steps}")
    return Setting(hash=config_hash(config), overrides=overrides, axes={}, config=config, predicted_s=None, label=name)
