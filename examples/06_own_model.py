"""Train a model, a loss and a data set of plain torch on unequal workers.

Minutes: 1. Expected output:
    bsp: 80 steps in
    asp: 80 steps in
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import ashl


def moons(count: int, seed: int) -> TensorDataset:
    """Return points of two half circles with noise."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.arange(count) % 2
    angle = torch.pi * torch.rand(count, generator=generator)
    x = torch.where(classes == 0, angle.cos(), 1 - angle.cos())
    y = torch.where(classes == 0, angle.sin(), 0.5 - angle.sin())
    noise = 0.1 * torch.randn(count, 2, generator=generator)
    return TensorDataset(torch.stack([x, y], 1) + noise, classes)


model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
data = (moons(1200, seed=0), moons(300, seed=1))  # training and test samples
common = {"runtime": "sim", "cluster": "one_slow", "tracking": "none", "stop.steps": 80}

for sync in ("bsp", "asp"):
    run = ashl.train(
        model=model,
        dataset=data,
        loss=nn.CrossEntropyLoss(label_smoothing=0.1),
        sync=sync,
        **common,
    )
    found = run.summary
    print(f"{sync}: {found['steps']} steps in {found['time_s']:.2f} s,", end=" ")
    print(f"waiting {found['wait_share']:.0%}, accuracy {found['final']['test_accuracy']:.1%}")
