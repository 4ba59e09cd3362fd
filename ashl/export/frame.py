"""What exported scripts have in common: the run, the frame with its model, data, loss, optimizer and learning rate, and
what none of them can say.

Samples are drawn anew by each worker, so that losses agree with the run's within the spread of seeds, not bit for bit.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple

from ashl.compression.contract import Codec
from ashl.errors import UsageError, parsed
from ashl.learn.device import HOST
from ashl.model.plain import PlainModel
from ashl.optimizer.adam import Adam
from ashl.optimizer.schedule import Scheduled
from ashl.optimizer.sgd import SGD
from ashl.outer.contract import Outer
from ashl.plan.files import read_plan
from ashl.plan.plan import Plan
from ashl.planning.build import Job, Options, StageParts, assemble
from ashl.planning.legal import chosen
from ashl.planning.legal_checkpoints import in_lockstep
from ashl.stage.rule import Rule
from ashl.stage.stage import Stage

FRAME = '''"""{run} {tool}: {what}.

{start}

{model}, {num_params:,} parameters. Needs {needs}ashl for the model and the data alone: put your own in their place.
"""

{imported}

SEED, BATCH, ROUNDS, WORKERS = {seed}, {batch}, {rounds}, {num_workers}{constants}


def model() -> nn.Module:
    {made}


def batches(rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The worker's own share of the data, in a new order each time round."""
{data}


{loss}

{optimizer}def learning_rate(samples: int) -> float:
    """By the samples that all have seen."""
{rate}


def train(rank: int) -> Iterator[float]:
    """{yields}."""
    torch.manual_seed(SEED)
    net, data = model(), batches(rank)
{train}

if __name__ == "__main__":
{begin}
    for k, loss in enumerate(train(rank)):
        if rank == 0 and k % 50 == 0:
            print(f"round {{k}}: loss {{loss:.4f}}", flush=True)
{end}'''

STARTED = """net = {call}
    net.load_state_dict(torch.load({start!r}, map_location="cpu", weights_only=True))
    return net"""
INNER = """    inner = optimizer(list(net.parameters()))
"""
BACKWARD = """inputs, targets = next(data)
loss = loss_of(net(inputs), targets)
inner.zero_grad()
loss.backward()
"""


def rate_set(samples: str) -> str:
    """The learning rate of a round, set."""
    return f"""        rate = learning_rate({samples})
        for group in inner.param_groups:
            group["lr"] = rate
"""


def local_steps(steps: str) -> str:
    """A worker's own steps in a round."""
    return f"""        losses = []
        for _ in range({steps}):
{indent(BACKWARD, 12 * " ")}            inner.step()
            losses.append(loss.item())
"""


TORCHRUN = (
    '    dist.init_process_group("gloo")\n    rank = dist.get_rank()',
    """    dist.barrier()
    dist.destroy_process_group()
""",
)
ALWAYS = ("from collections.abc import Iterator", "import torch", "from torch import Tensor, nn")
STANDARD = {"collections", "math", "sys"}

ASHL_DATA = """    data = {call}.load().train
    generator = torch.Generator().manual_seed(SEED)
    own = torch.randperm(len(data), generator=generator)[rank::WORKERS]
    generator = torch.Generator().manual_seed(SEED + 1 + rank)
    while True:
        order = own[torch.randperm(len(own), generator=generator)].repeat(1 + BATCH // len(own))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            yield data.batch(order[start : start + BATCH].numpy())
"""
RATES = {
    "constant": "    return {lr}",
    "linear": "    return {lr} * (1 - min((epochs - {warmup}) / {falls}, 1.0))",
    "cosine": "    return {lr} * (1 + math.cos(math.pi * min((epochs - {warmup}) / {falls}, 1.0))) / 2",
    "step": "    return {lr} * 0.1 ** ((epochs >= {horizon} / 2) + (epochs >= {horizon} * 3 / 4))",
}
CLASSES = """def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets)
"""


@dataclass(frozen=True)
class Run:
    """A run's folder, or one of `ashl advise`: its plan and what that stands for."""

    folder: Path
    plan: Plan
    job: Job

    @property
    def stage(self) -> Stage:
        """The last one."""
        return self.job.stages[-1]

    @property
    def own(self) -> StageParts:
        return self.job.parts.stages[-1]

    @property
    def differences(self) -> bool:
        """Whether workers exchange what their steps made of the model, and not gradients."""
        return self.stage.sync.exchange == "difference"

    @property
    def steps(self) -> list[int]:
        """Of each worker in a round."""
        return [worker.local_steps if self.differences else 1 for worker in self.stage.plan.workers]

    @property
    def weights(self) -> list[float]:
        return self.stage.weights(self.stage.workers)

    @property
    def alike(self) -> bool:
        """Whether all workers take as many steps, and count alike in a mean."""
        count = self.plan.num_workers
        return len(set(self.steps)) == 1 and all(abs(count * weight - 1) < 1e-6 for weight in self.weights)

    def totals(self) -> list[int]:
        """The steps of all workers in each stage: as they were, and before it has run, as planned.

        Raises UsageError where the plan has no such number.
        """
        file = self.folder / "summary.json"
        if file.exists():
            try:
                return [int(stage["steps"]) for stage in parsed(file.read_text(encoding="utf-8"))["stages"]]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise UsageError(
                    f"{file} is damaged; name another run, or delete it for as many rounds as planned."
                ) from error
        epoch, *before = self.stage.epoch_samples, *self.plan.stages[:-1]
        total = self.plan.num_steps(epoch)
        first = [stage.until["epochs"] * epoch / stage.workers[0].batch for stage in before if "epochs" in stage.until]
        if total is None or len(first) < len(before):
            raise UsageError(
                f"{self.folder} has no outcome (summary.json) and its plan no number of steps; name one that has ended."
            )
        return [*map(round, first), total - round(sum(first))]


class Own(NamedTuple):
    """What a target's script has of its own."""

    tool: str
    start: str  # the command line
    imports: Sequence[str]
    constants: str
    rounds: int
    yields: str  # what a number is that `train` yields
    train: str
    main: tuple[str, str] = TORCHRUN  # before all rounds, with the rank, and after them
    needs: str = ""  # beside ashl
    optimizer: bool = True  # whether it is one of torch's


def plan_in(run_dir: Path) -> Plan:
    """The plan of a run. Raises UsageError where there is none."""
    if not (run_dir / "plan.json").is_file():
        raise UsageError(f"{run_dir} is no folder of a run (it has no plan.json); name one, as runs/<date>/<run>.")
    return read_plan(str(run_dir / "plan.json"))


def opened(run_dir: Path) -> Run:
    """Raises UsageError."""
    plan = plan_in(run_dir)
    return Run(run_dir, plan, assemble(plan, HOST))


def framed(run: Run, name: str, own: Own) -> str:
    """The whole script."""
    plan, inner = run.plan, run.own.optimizer
    (imported, call), (also, data), (last, loss) = model_of(plan), data_of(plan), loss_of(plan)
    assert isinstance(inner, Scheduled)
    rate = rate_of(inner, run.stage.epoch_samples)
    maths = ("import math",) if "math." in rate else ()
    groups = ("sync", "schedule", "compression", "outer", "optimizer", "overlap")
    plain = {"schedule": "single", "overlap": "none"}
    chosen = {group: plan.choices.get(group) for group in groups}
    made = f"return {call}" if plan.start_from is None else STARTED.format(call=call, start=plan.start_from)
    return FRAME.format(
        run=run.folder,
        tool=own.tool,
        what=", ".join(f"{group}={name}" for group, name in chosen.items() if name not in (None, plain.get(group))),
        start=indent(own.start.format(name=name, num_workers=plan.num_workers), 4 * " "),
        needs=own.needs,
        num_workers=plan.num_workers,
        model=plan.choices["model"],
        num_params=plan.num_params,
        imported=imports([*ALWAYS, *maths, *own.imports, imported, also, last]),
        seed=plan.seed,
        batch=run.stage.plan.workers[0].batch,
        rounds=own.rounds,
        constants=f"\n{own.constants}" if own.constants else "",
        made=made,
        data=data.rstrip("\n"),
        loss=loss,
        optimizer=f"{optimizer_of(inner)}\n\n\n" if own.optimizer else "",
        rate=rate,
        yields=own.yields,
        train=own.train,
        begin=own.main[0],
        end=own.main[1],
    )


def imports(lines: Sequence[str]) -> str:
    """In three groups: the standard library, others, ashl."""
    groups: tuple[list[str], ...] = ([], [], [])
    for line in sorted({line for line in lines if line}, key=lambda line: (line.startswith("from"), line)):
        root = line.split()[1].partition(".")[0]
        groups[0 if root in STANDARD else 2 if root == "ashl" else 1].append(line)
    return "\n\n".join("\n".join(group) for group in groups if group)


def why_not(
    run: Run, sends: Callable[[Codec], bool], codecs: str, merges: Mapping[str, type[Outer]], *, schedule: str = ""
) -> str | None:
    """What of a run a script cannot say that has these codecs and outer optimizers, and a stage before the last under
    this schedule alone; None where it can say all. What a run exchanges late is for the target to judge."""
    plan, own, take, such = run.plan, run.own, "name a run with", "such a script has no"
    if len(plan.stages) > 1 and plan.choices["schedule"] != schedule:
        return f"it has {len(plan.stages)} stages; {take} one, as schedule=single"
    if type(own.sync).step is not Rule.step and plan.choices["schedule"] != schedule:
        return f"sync={chosen(own.sync)} has a step of its own; {take} sync=bsp or sync=local_sgd"
    if not run.job.parts.runtime.gradients:
        return f"it was only timed; {take} runtime.gradients=true"
    if not isinstance(own.optimizer, SGD | Adam):
        return f"optimizer={plan.choices['optimizer']} is none of torch's; {take} sgd, adam or adamw"
    if not sends(own.compression):
        return f"{such} compression={plan.choices['compression']}; {take} {codecs}"
    if not isinstance(own.outer, tuple(merges.values())):
        *others, last = merges
        names = f"{', '.join(others)} or {last}" if others else last
        return f"{such} outer={plan.choices['outer']}; {take} {names}"
    batches = {worker.batch for worker in plan.stages[-1].workers}
    if own.aggregate.clip_norm is not None or len(batches) > 1 or plan.dataset["partition"] == "dirichlet":
        return f"updates are clipped, batches differ or classes are skewed; {take} none of these"
    return None


def out_of_step(run: Run) -> str | None:
    """Why not all go round by round on the same model, each time to the end of its exchange."""
    if in_lockstep(run.job.parts, run.plan.num_workers) and run.own.topology.pull_ratio is None:
        return None
    return "not all go round by round on the same model; name a run with sync=bsp or sync=local_sgd"


def unlike(run: Run) -> str | None:
    """Why workers are not all the same in a mean."""
    if run.alike:
        return None
    return (
        "workers take different numbers of steps, or count differently; name a run with aggregate=uniform and a number "
        "as sync.local_steps"
    )


def model_of(plan: Plan) -> tuple[str, str]:
    """(what is imported, the call that makes the module)."""
    module, _, name = str(plan.model["_target_"]).rpartition(".")
    keys = {key: value for key, value in plan.model.items() if key != "_target_"}
    imported = f"from {module} import {name}"
    if not module.startswith("ashl."):
        return imported, f"{name}({arguments(keys)})  # as you make it"
    sizes: Mapping[str, Any] = {"sample_shape": plan.sample_shape, "num_classes": plan.num_classes}
    if isinstance(Options(()).of("model", plan.model), PlainModel):
        return imported, f"{name}({arguments({**keys, **sizes})})"
    return imported, f"{name}({arguments(keys)}).build({arguments(sizes)})"


def arguments(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in values.items())


def optimizer_of(inner: Scheduled) -> str:
    """The function that makes the workers' optimizer."""
    if isinstance(inner, SGD):
        made = (
            f"SGD(params, {inner.lr}, {inner.momentum}, weight_decay={inner.weight_decay}, nesterov={inner.nesterov})"
        )
    else:
        assert isinstance(inner, Adam)
        betas = f"({inner.beta1}, {inner.beta2})"
        made = f"{type(inner).__name__}(params, {inner.lr}, {betas}, {inner.eps}, weight_decay={inner.weight_decay})"
    return f"def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:\n    return torch.optim.{made}"


def rate_of(inner: Scheduled, epoch_samples: int) -> str:
    """The body of the function that says the learning rate."""
    warmup, horizon = inner.warmup_epochs, inner.horizon_epochs
    falls = None if horizon is None else horizon - warmup
    lines = [RATES[inner.schedule].format(lr=inner.lr, warmup=warmup, horizon=horizon, falls=falls)]
    if warmup:
        lines.insert(0, f"    if epochs < {warmup}:\n        return {inner.lr} * (0.1 + 0.9 * epochs / {warmup})")
    if "epochs" in "".join(lines):
        lines.insert(0, f"    epochs = samples / {epoch_samples}")
    return "\n".join(lines)


def data_of(plan: Plan) -> tuple[str, str]:
    """(what is imported, the body of the function that yields batches)."""
    module, _, name = str(plan.dataset["_target_"]).rpartition(".")
    if module.startswith("ashl."):
        keys = {key: value for key, value in plan.dataset.items() if key != "_target_"}
        return f"from {module} import {name}", ASHL_DATA.format(call=f"{name}({arguments(keys)})")
    return "", f"    raise NotImplementedError('yield (inputs, targets), BATCH samples of {name} at a time')\n"


def loss_of(plan: Plan) -> tuple[str, str]:
    """(what is imported, the loss)."""
    if plan.choices["task"] == "classification":
        return "", CLASSES
    module, _, name = str(plan.task["_target_"]).rpartition(".")
    keys = {key: value for key, value in plan.task.items() if key != "_target_"}
    return f"from {module} import {name}", f"loss_of = {name}({arguments(keys)}).loss\n"
