"""A run on a device without access to the host's memory: data cross by the transfer functions only,
with the same bits.
"""

import numpy as np
import pytest
import torch
from conf_option import conf_option

from ashl.data.dataset import Data, Split
from ashl.device import read_scalars, to_device, to_host
from ashl.learn.learner import Learner
from tests.golden.runs import RUNS
from tests.sim import test_checkpoint as checkpoints
from tests.stand_in_device import DEVICE, There, guarded
from tests.support import planned, run, slow_unless

QUICK = (  # rows of the golden set by mechanism; `-m slow` tries every row
    "bsp", "outer-nesterov", "uniform-clipped", "adamw-linear-decay", "topk-corrected", "power-sgd", "ring-dear",
    "ad-psgd", "ripples-random",
)  # fmt: skip
BRIEF = "stop.steps=12"  # the stand-in is slow
# the last bits of their lengths and products are the device's own
ROUNDED = ("qsgd", "qsgd-feedback", "terngrad", "demo", "rotated-pco")


@pytest.mark.parametrize("name", slow_unless(QUICK, (name for name in RUNS if RUNS[name].learns)))
def test_data_cross_by_the_transfer_functions_only(name: str) -> None:
    plan = planned(*RUNS[name].overrides, BRIEF)
    expected = run(plan)
    with guarded():
        found = run(plan, device=DEVICE)
    assert found.time_ns == expected.time_ns
    if name in ROUNDED:
        torch.testing.assert_close(found.params, expected.params)
    else:
        assert found.sha256 == expected.sha256


@pytest.mark.parametrize("name", ["topk-both-ways", "ad-psgd"])
def test_a_run_on_the_device_resumes_from_a_checkpoint(name: str) -> None:
    """The checkpoint lies in the host's memory."""
    with guarded():
        checkpoints.check_resumes((*checkpoints.row(name), "stop.steps=30"), DEVICE)


def test_local_steps_are_not_looked_at() -> None:
    """Losses are read once for each exchange."""
    row = (*RUNS["local-sgd"].overrides, "eval.every_commits=1000000")
    with guarded() as short:
        run(planned(*row, "sync.local_steps=2", "stop.steps=24"), device=DEVICE)
    with guarded() as long:
        run(planned(*row, "sync.local_steps=8", "stop.steps=96"), device=DEVICE)
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
        assert read_scalars([loss]) == read_scalars([expected[0]])
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
        assert read_scalars([loss]) == read_scalars([here.gradient(here.init(), batch, 0, 0)[0]])
        assert torch.equal(to_host(gradient), here.gradient(here.init(), batch, 0, 0)[1])
