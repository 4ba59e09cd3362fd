"""BSP, local SGD and post-local SGD by torch itself: DistributedDataParallel, and its periodic average of models.

Post-local SGD is synchronous until a switch; from then on gradients are no longer summed, and every H steps models are.
torch averages for the first time in the last step of the averager's warm-up: with that H − 1 steps longer than the
hook's, H steps come before each average.

Limits: our BSP before the switch exchanges differences, so that each worker's momentum is of its own gradients, and
DDP's of their mean. For SGD the models are the same up to the switch; the first few steps after it differ a little.
Source: torch.distributed.algorithms.model_averaging, torch 2.13; Lin et al., "Don't Use Large Mini-batches, Use Local
SGD", ICLR 2020.
"""

from textwrap import indent

from ashl.compression.none import Dense
from ashl.export.frame import BACKWARD, INNER, Own, Run, framed, out_of_step, rate_set, unlike, why_not
from ashl.optimizer.sgd import SGD
from ashl.outer.average import Average

TRAIN = f"""    net = DistributedDataParallel(net, forward_sync_buffers=False)
{{averaged}}    for k in range(ROUNDS):
{rate_set("k * BATCH * WORKERS")}{indent(BACKWARD, 8 * " ")}        inner.step()
{{average}}        yield loss.item()
"""
AVERAGED = """    alone = PostLocalSGDState(None, None, WARMUP, post_local_gradient_allreduce=False)
    net.register_comm_hook(alone, post_localSGD_hook)
    averager = PeriodicModelAverager(LOCAL_STEPS, WARMUP + LOCAL_STEPS - 1)
"""
AVERAGE = """        averager.average_parameters(net.parameters())
"""
HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook"
IMPORTS = (
    f"from {HOOKS} import PostLocalSGDState, post_localSGD_hook",
    "from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager",
)


def refused(run: Run) -> str | None:
    """What of a run torch has neither hook nor averager for."""
    why = why_not(run, lambda codec: isinstance(codec, Dense), "none", {"average": Average}, schedule="post_local")
    why = why or out_of_step(run) or unlike(run)
    if why is None and len(run.job.stages) > 1 and (not isinstance(run.own.optimizer, SGD) or run.stage.resets):
        return "before the switch DDP sums gradients; name a run with optimizer=sgd and schedule.momentum=keep"
    return why


def script(run: Run, name: str) -> str:
    """The script of a run that is not refused."""
    count, steps, totals = run.plan.num_workers, run.steps[0], run.totals()
    averages = run.differences and (steps > 1 or not isinstance(run.own.optimizer, SGD))
    warmup = sum(totals[:-1]) // count
    constants = f"LOCAL_STEPS = {steps}  # between two averages of the models\n" if averages else ""
    constants += f"WARMUP = {warmup}  # steps in which gradients are summed\n" if averages else ""
    own = Own(
        tool="with torch's DistributedDataParallel",
        start="torchrun --nproc-per-node={num_workers} {name}",
        imports=(
            "import torch.distributed as dist",
            "from torch.nn.parallel import DistributedDataParallel",
            *(IMPORTS if averages else ()),
        ),
        constants=constants.rstrip("\n"),
        rounds=max(1, round(sum(totals) / count)),
        yields="The loss of each step" + averages * ", of which every LOCAL_STEPS-th averages the models",
        train=INNER + TRAIN.format(averaged=AVERAGED * averages, average=AVERAGE * averages),
        needs="torch 2.13, and ",
    )
    return framed(run, name, own)
