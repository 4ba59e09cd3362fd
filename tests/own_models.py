"""Small models as users write them, each with something beside parameters that are learned and a
plain forward pass.
"""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

FEATURES, WIDTH, TOKENS = 4, 8, 11


class Net(nn.Module):
    """A layer, something between, and a head."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, num_classes)
        self.between = self.make()

    def make(self) -> nn.Module:
        return nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.between(self.body(x)).relu())


class Plain(Net):
    pass


class Normed(Net):
    def make(self) -> nn.Module:
        return nn.BatchNorm1d(WIDTH)


def known_norm(**keys: Any) -> nn.BatchNorm1d:
    norm = nn.BatchNorm1d(WIDTH, **keys)
    nn.init.constant_(norm.running_mean, 0.5)  # type: ignore[arg-type]
    nn.init.constant_(norm.running_var, 2.0)  # type: ignore[arg-type]
    return norm


class FrozenNorm(Net):
    """Holds its norm in evaluation mode by a `train` of its own."""

    def make(self) -> nn.Module:
        return known_norm().requires_grad_(False)

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.between.eval()
        return self


class NormInEvalMode(Net):
    def make(self) -> nn.Module:
        return known_norm().eval()


class NormWithoutMomentum(Net):
    """Batch statistics in training, those of before in evaluation."""

    def make(self) -> nn.Module:
        return known_norm(momentum=0.0)


class RunningNorm(nn.Module):
    """Normalises by running statistics of its own, in training, too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
                self.var.lerp_(x.var(0), 0.1)
        return (x - self.mean) / (self.var + 1e-5).sqrt()


class Running(Net):
    def make(self) -> nn.Module:
        return RunningNorm()


class Replaced(Net):
    """A buffer that is another tensor after each step, and that no file holds."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return self.head((h - self.mean).relu())


class WrittenBehindAutograd(Net):
    """A buffer that is written by way of `data`, which no version counter shows."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        if self.training:
            self.mean.data.mul_(0.9).add_(h.data.mean(0), alpha=0.1)
        return self.head((h - self.mean).relu())


class FrozenParts(Net):
    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.body.requires_grad_(False)
        self.head.bias.requires_grad_(False)


class Tied(Net):
    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(self.body(x)).relu()))


class Dropped(Net):
    def make(self) -> nn.Module:
        return nn.Dropout(0.3)


class Counting(Net):
    """A counter that a schedule of its own goes by."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        return super().forward(x) / (1 + 0.1 * self.count)


class CountingInPython(Net):
    """A counter in plain attributes, which also counts in evaluation mode."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.calls, self.scale = 0, 1.0
        self.history: deque[float] = deque(maxlen=3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.training:
            self.scale *= 0.99
            self.history.append(float(x.detach().mean()))
        return super().forward(x) * self.scale + sum(self.history)


class Late(Net):
    """A buffer that nothing changes in the first steps."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        if self.training:
            self.count += 1
            if self.count > 4:
                self.mean.lerp_(h.detach().mean(0), 0.2)
        return self.head((h - self.mean).relu())


class WeightNorm(Net):
    def make(self) -> nn.Module:
        return parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


class SpectralNorm(Net):
    def make(self) -> nn.Module:
        return parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


class OldSpectralNorm(Net):
    def make(self) -> nn.Module:
        return nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))


class Instances(Net):
    def make(self) -> nn.Module:
        norm = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
        return nn.Sequential(nn.Unflatten(1, (2, WIDTH // 2)), norm, nn.Flatten())


class Groups(Net):
    def make(self) -> nn.Module:
        return nn.Sequential(nn.GroupNorm(2, WIDTH), nn.LayerNorm(WIDTH))


class Padded(nn.Module):
    """Words with a padding word; its vector stays zero."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.words, self.head = (
            nn.Embedding(TOKENS, WIDTH, padding_idx=0),
            nn.Linear(WIDTH, num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x.abs().mul(3).long().clamp(max=TOKENS - 1)).mean(1))


class LazyBuffer(Net):
    """A buffer that the first batch makes."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "shift"):
            self.register_buffer("shift", x.detach().mean(0))
        return super().forward(x - self.shift)


class Teacher(Net):
    """A frozen copy that follows the layer."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.teacher = copy.deepcopy(self.body).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for mine, its in zip(
                    self.body.parameters(), self.teacher.parameters(), strict=True
                ):
                    its.lerp_(mine, 0.1)
        return self.head((self.body(x) + self.teacher(x)).relu())


class Remembering(Net):
    """A value of the last batch, as a plain tensor."""

    memory: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        if self.training:
            h = h if self.memory is None else h + 0.1 * self.memory
            self.memory = h.detach().mean(0)
        return self.head(h.relu())


class Cached(Net):
    """A mask that is made once, in a dictionary."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.masks: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in self.masks:
            self.masks[len(x)] = torch.linspace(0, 1, WIDTH)
        return self.head((self.body(x) * self.masks[len(x)]).relu())


MODELS = [one for one in (*Net.__subclasses__(), Padded) if one.__module__ == __name__]


class Blobs(torch.utils.data.Dataset):
    def __init__(self, train: bool, count: int = 96) -> None:
        generator = torch.Generator().manual_seed(1 if train else 2)
        self.y = torch.arange(count if train else count // 4) % 4
        centres = torch.tensor([[2.0, 0, 1, 0], [0, 2, 0, 1], [-2, 0, 0, -1], [0, -2, -1, 0]])
        self.x = centres[self.y] + torch.randn(len(self.y), FEATURES, generator=generator) + 1

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return self.x[number], int(self.y[number])
