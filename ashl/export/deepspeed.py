"""A run with DeepSpeed: BSP by its engine, and 1-bit Adam.

DeepSpeed has had 1-bit Adam up to 0.19.6, on CUDA devices. Of its other methods with few bits, 0/1 Adam and 1-bit LAMB
are none of ashl's.

Limits: DeepSpeed's 1-bit Adam is not ours to the bit: it takes no bias out of its means, its first step does nothing,
a tensor's bits have one length, ‖x‖₂/√d, and what is summed is compressed once more on its way back. Its weight decay
is decoupled from the first step on, as that of AdamW. Source: DeepSpeed 0.19,
https://github.com/deepspeedai/DeepSpeed, runtime/fp16/onebit/adam.py.
"""

from pathlib import Path

from ashl.compression.contract import Codec
from ashl.compression.none import Dense
from ashl.compression.one_bit import OneBit
from ashl.compression.sign import Sign
from ashl.errors import UsageError
from ashl.export.frame import INNER, Own, Run, framed, opened, out_of_step, rate_set, unlike, why_not
from ashl.optimizer.adam import Adam, AdamW
from ashl.outer.average import Average
from ashl.sync.one_bit_adam import OneBitAdam

TRAIN = f"""    net, inner, _, _ = deepspeed.initialize(model=net, {{stepping}}, config=CONFIG)
    for k in range(ROUNDS):
{rate_set("k * BATCH * WORKERS")}        inputs, targets = (x.to(net.device) for x in next(data))
        loss = loss_of(net(inputs), targets)
        net.backward(loss)
        net.step()
        yield loss.item()
"""
MAIN = "    deepspeed.init_distributed()\n    rank = dist.get_rank()", "    dist.destroy_process_group()\n"
CONFIG = """CONFIG = {{
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_clipping": 0.0,  # none{bits}
}}"""
BITS = """
    "optimizer": {{
        "type": "OneBitAdam",
        "params": {{
            "lr": {lr},
            "betas": [{beta1}, {beta2}],
            "eps": {eps},
            "weight_decay": {decay},
            "freeze_step": {warmup},  # up to here gradients are whole and the variance is learned
        }},
    }},"""
MERGES = {"average": Average}
STEPPING = {False: "optimizer=inner", True: "model_parameters=net.parameters()"}


def script(run_dir: Path, name: str = "train_deepspeed.py") -> str:
    """The script of a run. Raises UsageError for what DeepSpeed does not have, with the reason."""
    run = opened(run_dir)
    if why := refused(run):
        raise UsageError(f"{run_dir} cannot be written for DeepSpeed: {why}.")
    bits, totals = isinstance(run.stage.sync, OneBitAdam), run.totals()
    needs = '"deepspeed<0.19.7", which has 1-bit Adam, CUDA and cupy' if bits else "deepspeed"
    own = Own(
        tool="with DeepSpeed",
        start="torchrun --nproc-per-node={num_workers} {name}",
        imports=("import deepspeed", "import torch.distributed as dist"),
        constants=CONFIG.format(bits=bits_of(run, totals[0] // run.plan.num_workers) if bits else ""),
        rounds=max(1, round(sum(totals) / run.plan.num_workers)),
        yields="The loss of each step, on the mean gradient" + bits * ", and then on momenta in a bit an element",
        train=(("" if bits else INNER) + TRAIN).format(stepping=STEPPING[bits]),
        main=MAIN,
        needs=f"{needs} (pip install), and ",
        optimizer=not bits,
    )
    return framed(run, name, own)


def refused(run: Run) -> str | None:
    """What of it DeepSpeed does not have."""
    if isinstance(run.stage.sync, OneBitAdam):
        codecs = "one_bit, or sign with scale=mean, and feedback"
        why = why_not(run, a_bit, codecs, MERGES, schedule="one_bit_adam")
        inner = run.own.optimizer
        if why is None and inner.weight_decay and not isinstance(inner, AdamW):
            return (
                "its 1-bit Adam takes weight decay off the parameters from the start, where optimizer=adam adds it to "
                "the gradient; name a run with optimizer=adamw, or optimizer.weight_decay=0"
            )
    else:
        why = why_not(run, lambda codec: isinstance(codec, Dense), "none, or schedule=one_bit_adam", MERGES)
    if why is None and run.differences:
        return "it sums gradients, and not what steps made of the model; name a run with sync=bsp"
    return why or out_of_step(run) or unlike(run)


def a_bit(codec: Codec) -> bool:
    """Whether it sends signs with lengths of their own, and keeps what they lost."""
    scaled = isinstance(codec, OneBit) or (isinstance(codec, Sign) and codec.flags.contraction and codec.beta is None)
    return scaled and codec.feedback and (codec.momentum, codec.clip_norm) == (None, None)


def bits_of(run: Run, warmup: int) -> str:
    """The section of 1-bit Adam."""
    inner = run.own.optimizer
    assert isinstance(inner, Adam)
    decay = inner.weight_decay
    return BITS.format(lr=inner.lr, beta1=inner.beta1, beta2=inner.beta2, eps=inner.eps, decay=decay, warmup=warmup)
