"""Compress the gradients of a script of your own with torch's DistributedDataParallel.

Run with: torchrun --nproc-per-node 2 07_ddp_hook.py
Minutes: 1. Expected output:
    loss 0
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ashl

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)))
# 5 % of the elements travel; error feedback sends the rest in later steps.
model.register_comm_hook(*ashl.ddp_hook("topk", ratio=0.05))

target = torch.randn(32, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
torch.manual_seed(1 + dist.get_rank())  # each rank has batches of its own
for _ in range(300):
    x = torch.randn(64, 32)
    loss = nn.functional.cross_entropy(model(x), (x @ target).argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if dist.get_rank() == 0:
    print(f"loss {loss.item():.2f}")
dist.destroy_process_group()
