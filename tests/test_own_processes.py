"""Models as users write them on real processes: one worker is plain torch."""

from pathlib import Path

import pytest
import torch
from own_models import MODELS
from test_own_models import assert_same, chosen, options, plain_torch
from torch import nn

import ashl
from ashl.config.compose import compose
from ashl.learn.device import HOST
from ashl.learn.trainer import Trainer
from ashl.planning.build import assemble
from ashl.planning.make import make_plan
from ashl.run.monitor import FINAL

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm|spectral_norm:FutureWarning")


@pytest.fixture(autouse=True)
def _options(workplace: Path) -> None:
    options()


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_a_process_learns_what_plain_torch_learns(kind: type[nn.Module]) -> None:
    ran = ashl.train(*chosen(kind, 1, "runtime=local"), config_dir="options")
    plan = make_plan(compose(["runtime=sim", *chosen(kind, 1)], Path("options")))
    trainer = assemble(plan, HOST).stages[0].trainer
    assert isinstance(trainer, Trainer)
    assert_same(torch.load(ran.folder / FINAL), plain_torch(kind, trainer.batches), kind)
