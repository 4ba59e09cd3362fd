"""A plain DDP script: `python tests/watched_ddp.py SECONDS SLOW_RANK SLOWDOWN [EXIT_CODE]`.

It knows nothing of ashl.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Slow(nn.Module):
    """Takes so many seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return x


def main() -> None:
    seconds, slow, slowdown = float(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    step_s = 0.05 * (slowdown if rank == slow else 1)
    model = DistributedDataParallel(nn.Sequential(Slow(step_s), nn.Linear(64, 64), nn.ReLU()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(int(seconds / (0.05 * slowdown))):
        loss = model(torch.ones(8, 64)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print("final", os.environ.get("OWN"))
    dist.barrier()
    sys.stdout.flush()
    os._exit(int(sys.argv[4]) if len(sys.argv) > 4 else 0)


if __name__ == "__main__":
    main()
