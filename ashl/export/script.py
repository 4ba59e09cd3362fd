"""A run as a script of plain torch: its model, its data and its combination in some eighty lines, for torchrun.

What can be written like this is a run of one stage in which all go round by round and sum what they have, by
all-reduce or through a server, which is the same arithmetic: gradients at every step, or what H local steps made of the
model, with Top-K on the way and momentum outside. Modes that wait for nobody need a server that decides; there is no
short script of that.
"""

from pathlib import Path
from textwrap import indent

from ashl.compression.contract import Codec
from ashl.compression.none import Dense
from ashl.compression.topk import TopK
from ashl.errors import UsageError
from ashl.export.frame import BACKWARD, INNER, Own, framed, local_steps, opened, out_of_step, rate_set, why_not
from ashl.outer.average import Average
from ashl.outer.contract import Outer
from ashl.outer.heavy_ball import HeavyBall
from ashl.outer.nesterov import Nesterov

GRADIENTS = """    params = list(net.parameters()){kept}
    for k in range(ROUNDS):
{rate}{backward}        total = parameters_to_vector([p.grad for p in params]){send}
        start = 0
        for p in params:
            p.grad = total[start : start + p.numel()].view_as(p)
            start += p.numel()
        inner.step()
        yield loss.item()
"""
DIFFERENCES = """    params = list(net.parameters()){kept}
    before = parameters_to_vector(params).detach().clone()
    {momentum}for k in range(ROUNDS):
{rate}{local}        total = parameters_to_vector(params).detach() - before{send}
        {step}
        vector_to_parameters(before.clone(), params)
        yield sum(losses) / len(losses)
"""
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
MERGES = {"average": Average, "heavy_ball": HeavyBall, "nesterov": Nesterov}
YIELDS = {
    False: "The loss of each round: a gradient of every worker, one step on their sum",
    True: "The mean loss of each round: local steps of every worker, then what they made of the model, summed",
}


def script(run_dir: Path, name: str = "script.py") -> str:
    """The script of a run. Raises UsageError for what cannot be written like this, with the reason."""
    run = opened(run_dir)
    if why := why_not(run, sends, "none, or plain topk", MERGES) or out_of_step(run):
        raise UsageError(f"{run_dir} cannot be written as a script of plain torch: {why}.")
    steps, differences = run.steps, run.differences
    send, kept = sent_by(run.own.compression, differences)
    momentum, step = merged_by(run.own.outer)
    if differences:
        body = DIFFERENCES.format(
            kept=kept,
            momentum=momentum,
            rate=rate_set("k * BATCH * sum(LOCAL_STEPS)"),
            local=local_steps("LOCAL_STEPS[rank]"),
            send=send,
            step=step,
        )
    else:
        backward = indent(BACKWARD, 8 * " ")
        body = GRADIENTS.format(kept=kept, rate=rate_set("k * BATCH * WORKERS"), backward=backward, send=send)
    own = Own(
        tool="in plain torch",
        start="torchrun --nproc-per-node={num_workers} {name}",
        imports=(
            "import torch.distributed as dist",
            f"from torch.nn.utils import parameters_to_vector{', vector_to_parameters' if differences else ''}",
        ),
        constants=(f"LOCAL_STEPS = {steps}  # of each worker in a round\n" if differences else "")
        + f"WEIGHTS = {[round(weight, 9) for weight in run.weights]}  # of what each worker brings",
        rounds=max(1, round(sum(run.totals()) / sum(steps))),
        yields=YIELDS[differences],
        train=INNER + body,
    )
    return framed(run, name, own)


def sends(codec: Codec) -> bool:
    """Whether it is none, or Top-K with no more around it than error feedback."""
    plain = (codec.feedback_gain, codec.feedback_decay, codec.momentum, codec.clip_norm) == (1.0, 1.0, None, None)
    extras = bool(codec.warmup_epochs or codec.layers or codec.critical_ratio)
    return isinstance(codec, Dense | TopK) and plain and not extras


def sent_by(codec: Codec, differences: bool) -> tuple[str, str]:
    """(what a worker does with its vector before it is summed, what it keeps for that)."""
    if not isinstance(codec, TopK):
        return DENSE, ""
    send = (TOP_K if codec.feedback else FORGETFUL).replace("RATIO", repr(codec.ratio))
    if not differences:  # what is left of gradients is kept in units of the model, as rates change
        send = send.replace("+ kept", "+ kept / (rate or 1.0)")
        send = send.replace("kept = x - sent", "kept = (x - sent) * rate if rate else kept")
    return send, TOP_K_STATE if codec.feedback else ""


def merged_by(outer: Outer) -> tuple[str, str]:
    """(the momentum at first, what becomes of the model)."""
    if not isinstance(outer, HeavyBall | Nesterov):
        return "", "before += total"
    ahead = f"(total + {outer.momentum} * momentum)" if isinstance(outer, Nesterov) else "momentum"
    step = f"momentum = {outer.momentum} * momentum + total\n        before += {outer.lr} * {ahead}"
    return "momentum = torch.zeros_like(before)\n    ", step
