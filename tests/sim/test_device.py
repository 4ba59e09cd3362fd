"""A run on a device without access to the host's memory: data cross by the transfer functions only,
with the same bits.
"""

import numpy as np
import pytest
import torch
from conf_option import conf_option

from ashl.data.dataset import Data, Split
from ashl.learn.device import numbers, to_device, to_host
from ashl.learn.learner import Learner
from tests.sim import test_checkpoint as checkpoints
from tests.stand_in_device import DEVICE, There, guarded
from tests.support import planned, run

pytestmark = pytest.mark.usefixtures("short_forecasts")

TASK = (
    "model=mlp",
    "dataset=digits",
    "stop.steps=18",
    "eval.every_commits=1000000",
    "cluster.compute=[1,2,3]",
)
RUNS = {
    "bsp": ("sync=bsp",),
    "bsp, momentum, Nesterov outside": ("sync=local_sgd", "sync.local_steps=3", "outer=nesterov"),
    "ssp, Top-K both ways": (
        "sync=ssp",
        "compression=topk",
        "compression.ratio=0.1",
        "topology.pull_ratio=0.1",
    ),
    "asp, adam": ("sync=asp", "optimizer=adam", "aggregate.clip_norm=0.1"),
    "ashl": ("schedule=ashl", "schedule.loss_switch=2.2", "stop.steps=120"),
    "all-reduce, QSGD": ("topology=all_reduce", "sync=bsp", "compression=qsgd"),
    "all-reduce, 16 bits": ("topology=all_reduce", "sync=bsp", "compression=cast"),
    "all-reduce, one mask": ("topology=all_reduce", "sync=bsp", "compression=random_mask"),
    "all-reduce, signs": (
        "topology=all_reduce",
        "sync=bsp",
        "compression=sign",
        "compression.error_feedback=true",
    ),
    "gTop-k": ("topology=all_reduce", "sync=bsp", "compression=gtopk"),
    "STC both ways": ("sync=asp", "compression=stc", "topology.pull_ratio=0.1"),
    "majority": (
        "sync=bsp",
        "compression=sign",
        "compression.scale=none",
        "compression.vote=majority",
        "compression.error_feedback=false",
    ),
    "velocities, clipped": (
        "sync=bsp",
        "compression=topk",
        "compression.momentum=0.9",
        "compression.error_feedback=false",
        "compression.clip_norm=0.1",
        "optimizer.momentum=0",
    ),
    "1 bit, measured": (
        "sync=asp",
        "compression=one_bit",
        "run.compression_stats_every=3",
        "run.compression_stats_per_layer=true",
    ),
    "all-reduce, PowerSGD": ("topology=all_reduce", "sync=bsp", "compression=power_sgd"),
    "PowerSGD": ("sync=asp", "compression=power_sgd", "compression.error_feedback=true"),
    "TernGrad, one scale": (
        "topology=all_reduce",
        "sync=bsp",
        "compression=terngrad",
        "compression.per_layer=true",
        "compression.shared_scale=true",
    ),
    "levels by an entropy code": (
        "sync=asp",
        "compression=qsgd",
        "compression.norm=max",
        "compression.entropy=elias",
    ),
    "AdaComp": ("sync=asp", "compression=adacomp"),
    "Strom": ("sync=ssp", "compression=strom", "compression.error_feedback=true"),
    "SparseLoCo": ("sync=local_sgd", "compression=sparse_loco", "topology.pull_ratio=0.1"),
    "EControl": ("sync=bsp", "compression=econtrol"),
    "gTop-k by a server": ("sync=bsp", "compression=gtopk"),
    "merged": ("topology=all_reduce", "sync=bsp", "overlap=merged"),
    "dear": ("topology=all_reduce", "sync=bsp", "overlap=dear", "overlap.plan=layers"),
    "late": ("sync=bsp", "overlap=delayed"),
    "layer by layer": ("topology=all_reduce", "sync=bsp", "overlap=layerwise", "compression=topk"),
    "DIANA": ("sync=bsp", "compression=diana"),
    "LAQ": ("sync=bsp", "compression=laq", "optimizer.momentum=0"),
    "variance": ("sync=bsp", "compression=variance"),
    "gossip": ("topology=gossip", "sync=d_psgd", "topology.graph=ring"),
    "choco": ("topology=gossip", "sync=choco", "topology.graph=ring", "compression=topk"),
    "ad_psgd": ("topology=gossip", "sync=ad_psgd", "topology.graph=ring"),
    "groups": (
        "topology=partial_all_reduce",
        "schedule=single",
        "sync=ripples_random",
        "sync.group_size=2",
    ),
    "averaged momentum": ("sync=pr_sgd_momentum", "sync.local_steps=2"),
    "growing batches": ("sync=cr_psgd_catalyst", "sync.growth=1.5", "sync.budget=300"),
    "easgd": ("sync=easgd", "sync.local_steps=2"),
    "ringleader, EF21": ("sync=ringleader", "compression=ef21"),
    "rescaled, HeLoCo": ("sync=rescaled_asgd", "sync.local_steps=2", "outer=heloco"),
    "gossip_pga": ("topology=gossip", "sync=gossip_pga", "sync.period=2"),
    "1-bit Adam": ("schedule=one_bit_adam", "schedule.warmup_epochs=0.2"),
    "0/1 Adam": (
        "sync=zero_one_adam",
        "topology=all_reduce",
        "compression=one_bit",
        "optimizer=adam",
        "sync.freeze_step=3",
    ),
    "muon": ("sync=local_sgd", "optimizer=muon", "topology=all_reduce"),
    "asylpg": ("sync=asylpg",),
    "spy": ("sync=spy", "optimizer.momentum=0", "optimizer.weight_decay=0"),
}
OFTEN = (
    "spy",
    "LAQ",
    "bsp",
    "levels by an entropy code",
    "AdaComp",
    "Strom",
    "SparseLoCo",
    "EControl",
    "gTop-k by a server",
    "all-reduce, 16 bits",
    "all-reduce, one mask",
    "all-reduce, signs",
    "majority",
    "gTop-k",
    "PowerSGD",
    "STC both ways",
    "1 bit, measured",
    "ashl",
    "merged",
    "late",
    "all-reduce, QSGD",
    "DIANA",
    "variance",
    "gossip",
    "asylpg",
    "averaged momentum",
    "growing batches",
    "easgd",
    "ringleader, EF21",
    "rescaled, HeLoCo",
    "gossip_pga",
    "1-bit Adam",
    "0/1 Adam",
    "muon",
)  # as others do
ROUNDED = ("all-reduce, QSGD",)  # the last bits of its lengths are the device's own


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in OFTEN)) for name in RUNS]
)
def test_data_cross_by_the_transfer_functions_only(name: str) -> None:
    plan = planned(*TASK, *RUNS[name])
    expected = run(plan)
    with guarded():
        found = run(plan, device=DEVICE)
    assert found.time_ns == expected.time_ns
    if name in ROUNDED:
        torch.testing.assert_close(found.params, expected.params)
    else:
        assert found.sha256 == expected.sha256


@pytest.mark.parametrize("name", ["ssp, Top-K both ways", "ad_psgd"])
def test_a_run_on_the_device_resumes_from_a_checkpoint(name: str) -> None:
    """The checkpoint lies in the host's memory."""
    with guarded():
        checkpoints.check_resumes((*TASK, *RUNS[name]), DEVICE)


def test_local_steps_are_not_looked_at() -> None:
    """Losses are read once for each exchange."""
    with guarded() as short:
        run(planned(*TASK, "sync=local_sgd", "sync.local_steps=2"), device=DEVICE)
    with guarded() as long:
        run(planned(*TASK, "sync=local_sgd", "sync.local_steps=8", "stop.steps=72"), device=DEVICE)
    assert long.reads == short.reads


def test_the_guard_sees_transfers_past_its_functions() -> None:
    with guarded():
        there = to_device(torch.ones(3), DEVICE)
        assert isinstance(there * 2, There)
        for look in (
            there.sum().item,
            there.cpu,
            there.numpy,
            there.tolist,
            lambda: bool(there.any()),
        ):
            with pytest.raises(AssertionError):
                look()
        with pytest.raises(AssertionError, match="mixes"):
            there + torch.ones(3)


@pytest.mark.parametrize("model", ["resnet8", "cnn"])
def test_pixels(model: str) -> None:
    """Normalisation, augmentation and evaluation agree with the host."""
    pixels = torch.arange(40 * 3 * 32 * 32).remainder(251).to(torch.uint8).view(40, 3, 32, 32)
    split = Split(pixels, torch.arange(40) % 5, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.2))
    data = Data(split, split, sample_shape=(3, 32, 32), num_classes=5, augment="crop_flip")
    args = (conf_option("model", model), data, conf_option("task", "classification"))
    here, batch = Learner(*args, seed=0), np.arange(0, 40, 3)
    expected, at = here.gradient(here.init(), batch, 1, 2), here.evaluate(here.init())
    with guarded():
        there = Learner(*args, seed=0, device=DEVICE)
        loss, gradient = there.gradient(there.init(), batch, 1, 2)
        assert numbers([loss]) == numbers([expected[0]])
        assert torch.equal(to_host(gradient), expected[1])
        assert there.evaluate(there.init()) == at


@pytest.mark.parametrize("graphs", [False, True])
def test_a_large_model_is_copied_for_a_step_only_where_that_is_captured(
    graphs: bool, monkeypatch
) -> None:
    split = Split(torch.arange(512.0).view(8, 64).sin(), torch.arange(8) % 4)
    data = Data(split, split, sample_shape=(64,), num_classes=4)
    args = (conf_option("model", "mlp", hidden=[1024]), data, conf_option("task", "classification"))
    here, batch, copied = Learner(*args, seed=0), np.arange(8), []
    with guarded():
        there = Learner(*args, seed=0, device=DEVICE, graphs=graphs)
        params, ask = there.init(), There.__torch_dispatch__

        def listening(
            cls: type, func: object, types: object, operands: tuple = (), named: object = None
        ) -> object:
            if func is torch.ops.aten.copy_.default:
                copied.append(operands[0].numel())
            return ask(func, types, operands, named)

        monkeypatch.setattr(There, "__torch_dispatch__", classmethod(listening))
        loss, gradient = there.gradient(params, batch, 0, 0)
        assert copied.count(there.num_params) == int(graphs)
        assert numbers([loss]) == numbers([here.gradient(here.init(), batch, 0, 0)[0]])
        assert torch.equal(to_host(gradient), here.gradient(here.init(), batch, 0, 0)[1])
