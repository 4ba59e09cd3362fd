"""A run as a script of plain torch: its model, its data and its combination in some eighty lines, for torchrun.

What can be written like this is a run of one stage in which all go round by round and sum what they have, by
all-reduce or through a server, which is the same arithmetic: gradients at every step, or what H local steps made of the
model, with Top-K on the way and momentum outside. Modes that wait for nobody need a server that decides; there is no
short script of that. Samples are drawn anew by each worker, so that losses agree with the run's within the spread of
seeds, not bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ashl.compression.contract import Codec
from ashl.compression.none import Dense
from ashl.compression.topk import TopK
from ashl.errors import UsageError
from ashl.learn.device import HOST
from ashl.optimizer.adam import Adam
from ashl.optimizer.schedule import Scheduled
from ashl.optimizer.sgd import SGD
from ashl.outer.average import Average
from ashl.outer.contract import Outer
from ashl.outer.heavy_ball import HeavyBall
from ashl.outer.nesterov import Nesterov
from ashl.plan.plan import Plan
from ashl.planning.build import Parts, assemble
from ashl.planning.legal_checkpoints import in_lockstep
from ashl.run.ddp import arguments, model_of, plan_in

SCRIPT = '''"""{run} in plain torch: {what}.

    torchrun --nproc-per-node={num_workers} {name}

{model}, {num_params:,} parameters. Needs ashl for the model and the data alone: put your own in their place.
"""
{math}
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

{imported}
SEED, BATCH, ROUNDS = {seed}, {batch}, {rounds}
LOCAL_STEPS = {local_steps}  # of each worker in a round
WEIGHTS = {weights}  # of what each worker brings


def model() -> nn.Module:
    return {call}


def batches(rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The worker's own share of the data, in a new order each time round."""
{data}


{loss}

{optimizer}


def learning_rate(samples: int) -> float:
    """By the samples that all have seen."""
{rate}


{train}

if __name__ == "__main__":
    dist.init_process_group("gloo")
    for k, loss in enumerate(train(dist.get_rank())):
        if dist.get_rank() == 0 and k % 50 == 0:
            print(f"round {{k}}: loss {{loss:.4f}}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
'''

ASHL_DATA = """    data = {call}.load().train
    generator = torch.Generator().manual_seed(SEED)
    own = torch.randperm(len(data), generator=generator)[rank :: len(WEIGHTS)]
    generator = torch.Generator().manual_seed(SEED + 1 + rank)
    while True:
        order = own[torch.randperm(len(own), generator=generator)].repeat(1 + BATCH // len(own))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            yield data.batch(order[start : start + BATCH].numpy())
"""

GRADIENTS = '''def train(rank: int) -> Iterator[float]:
    """The loss of each round: a gradient of every worker, one step on their sum."""
    torch.manual_seed(SEED)
    net, data = model(), batches(rank)
    params = list(net.parameters())
    inner = optimizer(params){kept}
    for k in range(ROUNDS):
        rate = learning_rate(k * BATCH * len(WEIGHTS))
        for group in inner.param_groups:
            group["lr"] = rate
        inputs, targets = next(data)
        loss = loss_of(net(inputs), targets)
        inner.zero_grad()
        loss.backward()
        total = parameters_to_vector([p.grad for p in params]){send}
        start = 0
        for p in params:
            p.grad = total[start : start + p.numel()].view_as(p)
            start += p.numel()
        inner.step()
        yield loss.item()
'''

DIFFERENCES = '''def train(rank: int) -> Iterator[float]:
    """The mean loss of each round: local steps of every worker, then what they made of the model, summed."""
    torch.manual_seed(SEED)
    net, data = model(), batches(rank)
    params = list(net.parameters())
    inner = optimizer(params){kept}
    before = parameters_to_vector(params).detach().clone()
    {momentum}for k in range(ROUNDS):
        for group in inner.param_groups:
            group["lr"] = learning_rate(k * BATCH * sum(LOCAL_STEPS))
        losses = []
        for _ in range(LOCAL_STEPS[rank]):
            inputs, targets = next(data)
            loss = loss_of(net(inputs), targets)
            inner.zero_grad()
            loss.backward()
            inner.step()
            losses.append(loss.item())
        total = parameters_to_vector(params).detach() - before{send}
        {step}
        vector_to_parameters(before.clone(), params)
        yield sum(losses) / len(losses)
'''

DENSE = """
        total *= WEIGHTS[rank]
        dist.all_reduce(total)"""
TOP_K = """
        x = total + kept
        largest = x.abs().topk(max(1, round(RATIO * len(x)))).indices
        sent = torch.zeros_like(x).index_copy_(0, largest, x[largest])
        kept = x - sent
        total = sent * WEIGHTS[rank]
        dist.all_reduce(total)  # zeros travel, too: gather values and places where bytes count"""
TOP_K_STATE = """
    kept = torch.zeros(sum(p.numel() for p in params))"""
FORGETFUL = TOP_K.replace(" + kept", "").replace("        kept = x - sent\n", "")

RATES = {
    "constant": "    return {lr}",
    "linear": "    return {lr} * (1 - min((epochs - {warmup}) / {falls}, 1.0))",
    "cosine": "    return {lr} * (1 + math.cos(math.pi * min((epochs - {warmup}) / {falls}, 1.0))) / 2",
    "step": "    return {lr} * 0.1 ** ((epochs >= {horizon} / 2) + (epochs >= {horizon} * 3 / 4))",
}
CLASSES = """def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets)
"""


def script(run_dir: Path, name: str = "script.py") -> str:
    """The script of a run that has ended. Raises UsageError for what cannot be written like this, with the reason."""
    plan = plan_in(run_dir)
    job = assemble(plan, HOST)
    stage, own = job.stages[-1], job.parts.stages[-1]
    if why := inexpressible(plan, job.parts):
        raise UsageError(f"{run_dir} cannot be written as a script of plain torch: {why}.")
    differences = stage.sync.exchange == "difference"
    steps = [worker.local_steps if differences else 1 for worker in stage.plan.workers]
    send, kept = sent_by(own.compression, differences)
    momentum, step = merged_by(own.outer)
    (imported, call), (also, data), (last, loss) = model_of(plan), data_of(plan), loss_of(plan)
    assert isinstance(own.optimizer, Scheduled)
    rate = rate_of(own.optimizer, stage.epoch_samples)
    return SCRIPT.format(
        run=run_dir,
        what=", ".join(f"{group}={plan.choices[group]}" for group in ("sync", "compression", "outer", "optimizer")),
        num_workers=plan.num_workers,
        name=name,
        model=plan.choices["model"],
        num_params=plan.num_params,
        math="\nimport math" if "math." in rate else "",
        imported="".join(sorted({imported.strip("\n") + "\n", also, last})),
        seed=plan.seed,
        batch=stage.plan.workers[0].batch,
        rounds=rounds_of(run_dir, sum(steps)),
        local_steps=steps,
        weights=[round(weight, 9) for weight in stage.weights(stage.workers)],
        call=call,
        data=data.rstrip("\n"),
        loss=loss,
        optimizer=optimizer_of(own.optimizer),
        rate=rate,
        train=(DIFFERENCES if differences else GRADIENTS).format(kept=kept, send=send, momentum=momentum, step=step),
    )


def inexpressible(plan: Plan, parts: Parts) -> str | None:
    """What of a run no such script can say, and what to do; None where it can say all."""
    stages, own, take = plan.stages, parts.stages[-1], "name a run with"
    batches = {worker.batch for worker in stages[-1].workers}
    if len(stages) > 1:
        return f"it has {len(stages)} stages; {take} one, as schedule=single"
    if not in_lockstep(parts, plan.num_workers) or own.topology.pull_ratio is not None:
        return f"not all go round by round on the same model; {take} sync=bsp or sync=local_sgd"
    if not parts.runtime.gradients:
        return f"it was only timed; {take} runtime.gradients=true"
    if not isinstance(own.optimizer, SGD | Adam):
        return f"optimizer={plan.choices['optimizer']} is none of torch's; {take} sgd, adam or adamw"
    if not isinstance(own.compression, Dense | TopK) or extras(own.compression):
        return f"compression={plan.choices['compression']} takes more than a few lines; {take} none, or plain topk"
    if not isinstance(own.outer, Average | HeavyBall | Nesterov):
        return f"outer={plan.choices['outer']} takes more than a few lines; {take} average, heavy_ball or nesterov"
    if own.aggregate.clip_norm is not None or len(batches) > 1 or plan.dataset["partition"] == "dirichlet":
        return f"updates are clipped, batches differ or classes are skewed; {take} none of these"
    return None


def extras(codec: Codec) -> bool:
    """What is set around Top-K beside error feedback."""
    plain = (codec.feedback_gain, codec.feedback_decay, codec.momentum, codec.clip_norm) == (1.0, 1.0, None, None)
    return not plain or bool(codec.warmup_epochs or codec.layers or codec.critical_ratio)


def sent_by(codec: Codec, differences: bool) -> tuple[str, str]:
    """(what a worker does with its vector before it is summed, what it keeps for that)."""
    if not isinstance(codec, TopK):
        return DENSE, ""
    send = (TOP_K if codec.feedback else FORGETFUL).replace("RATIO", repr(codec.ratio))
    if not differences:  # what is left of gradients is kept in units of the model, as rates change
        send = send.replace("+ kept", "+ kept / rate").replace("kept = x - sent", "kept = (x - sent) * rate")
    return send, TOP_K_STATE if codec.feedback else ""


def merged_by(outer: Outer) -> tuple[str, str]:
    """(the momentum at first, what becomes of the model)."""
    if not isinstance(outer, HeavyBall | Nesterov):
        return "", "before += total"
    ahead = f"(total + {outer.momentum} * momentum)" if isinstance(outer, Nesterov) else "momentum"
    step = f"momentum = {outer.momentum} * momentum + total\n        before += {outer.lr} * {ahead}"
    return "momentum = torch.zeros_like(before)\n    ", step


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
        return f"from {module} import {name}\n", ASHL_DATA.format(call=f"{name}({arguments(keys)})")
    return "", f"    raise NotImplementedError('yield (inputs, targets), BATCH samples of {name} at a time')\n"


def loss_of(plan: Plan) -> tuple[str, str]:
    """(what is imported, the loss)."""
    if plan.choices["task"] == "classification":
        return "", CLASSES
    module, _, name = str(plan.task["_target_"]).rpartition(".")
    keys = {key: value for key, value in plan.task.items() if key != "_target_"}
    return f"from {module} import {name}\n", f"loss_of = {name}({arguments(keys)}).loss\n"


def rounds_of(run_dir: Path, steps: int) -> int:
    """How many rounds of so many steps the run took. Raises UsageError where it has not ended."""
    try:
        summary: Mapping[str, Any] = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
        return max(1, round(summary["steps"] / steps))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{run_dir} has no outcome (summary.json); name a run that has ended.") from error
