"""A run with torch's DistributedDataParallel: with a merge plan, a script in which plain DDP has buckets of the same
groups; else, see `averaged`.

A bucket of DDP closes when it has reached its cap, and DDP fills buckets in the order in which gradients came in the
first iterations. So the caps are the sizes of the messages, where the groups come one after the other; where they do
not, only registration order gives the same buckets, which DDP keeps to with `find_unused_parameters`.

Source: Li et al., "PyTorch Distributed", VLDB 2020, and torch 2.13, which has `bucket_cap_mb_list`.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from textwrap import fill

import numpy as np

from ashl.errors import UsageError
from ashl.export import averaged
from ashl.export.frame import model_of, opened, plan_in
from ashl.learn.learner import Learner
from ashl.learn.making import load_data
from ashl.overlap.chain import Part, bare, joined
from ashl.plan.plan import Plan
from ashl.planning.build import Options, layer_groups

SCRIPT = '''"""Plain DistributedDataParallel with the messages of {run}: {overlap}.

    torchrun --nproc-per-node={num_workers} {name}

{model}, {num_params:,} parameters in {count}. Needs torch 2.13.
"""

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

{imported}

# Bytes of each message. A bucket closes when it has reached its cap, so these are the caps.
{remark}
{messages}


def model() -> nn.Module:
    return {call}


def wrapped(module: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(
        module,
        bucket_cap_mb_list=[nbytes / 2**20 for nbytes in MESSAGES],
        gradient_as_bucket_view=True,
        forward_sync_buffers=False,{unused}
    )


if __name__ == "__main__":
    dist.init_process_group("gloo")
    net = wrapped(model())
    # Here goes your training loop: loss.backward() sums the gradient bucket by bucket.
    dist.destroy_process_group()
'''

REBUILT = (
    "# The last layers first. DDP orders its buckets by the first backward passes; from the third on they are these."
)
REGISTERED = """# The first layers first: a backward pass mixes the gradients of neighbouring messages, so DDP is kept
# to registration order, which it only is while it looks for unused parameters."""
UNSEEN = """# The last layers first. From the third iteration on they are DDP's buckets, if gradients come in the
# order opposite to that of the model's parameters: it is your own code, and was not looked at."""


def script(run_dir: Path, name: str = "ddp.py") -> str:
    """The script of a run: with its messages, where its gradients travelled in parts. Raises UsageError."""
    plan = plan_in(run_dir)
    messages = messages_of(plan)
    if not messages:
        run = opened(run_dir)
        if why := averaged.refused(run):
            raise UsageError(f"{run_dir} cannot be written for DistributedDataParallel: {why}.")
        return averaged.script(run, name)
    own = all(str(spec["_target_"]).startswith("ashl.") for spec in (plan.model, plan.dataset, plan.task))
    ordered = come_in_order(plan, messages) if own else True
    sizes = [4 * (part.stop - part.start) for part in messages]
    imported, call = model_of(plan)
    return SCRIPT.format(
        run=run_dir,
        overlap=f"overlap={plan.choices.get('overlap', 'none')}",
        num_workers=plan.num_workers,
        name=name,
        model=plan.choices["model"],
        num_params=plan.num_params,
        count=f"{len(sizes)} message{'s' if len(sizes) > 1 else ''}",
        imported=imported,
        remark=(REBUILT if ordered else REGISTERED) if own else UNSEEN,
        messages=fill(f"MESSAGES = {sizes if ordered else sizes[::-1]}", 120, subsequent_indent=" " * 12),
        call=call,
        unused="" if ordered else "\n        find_unused_parameters=True,",
    )


def messages_of(plan: Plan) -> tuple[Part, ...]:
    """What each message holds, the last layers first, in the last stage that has such messages."""
    options, groups = Options(()), layer_groups(plan)
    for stage in reversed(plan.stages):
        overlap = options.of("overlap", stage.overlap)
        if not overlap.serial and options.of("compression", stage.compression).flags.lossless:
            return joined(groups, overlap.messages(bare(groups)))
    return ()


def come_in_order(plan: Plan, messages: Sequence[Part]) -> bool:
    """Whether a backward pass comes to all tensors of a message before it comes to those of the next one."""
    options = Options(())
    model, dataset, task = (options.of(g, getattr(plan, g)) for g in ("model", "dataset", "task"))
    learner = Learner(model, load_data(dataset, plan.seed), task, seed=plan.seed)
    bounds = [0, *accumulate(prod(shape) for _, shape in learner.layers)]
    came: list[int] = []
    batch = np.arange(plan.stages[-1].workers[0].batch)
    learner.gradient_in_parts(learner.init(), batch, 0, 0, list(pairwise(bounds)), lambda k, _: came.append(bounds[k]))
    holds = [next(m for m, part in enumerate(messages) if part.start <= start < part.stop) for start in came]
    return holds == sorted(holds)
